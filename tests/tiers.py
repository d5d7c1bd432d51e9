"""Two tiers of tests: those of every change, and those of ``make thorough``, marked ``thorough``."""

import os

THOROUGH = "THOROUGH" in os.environ
