"""Two tiers of tests: those of every change, and those of ``make thorough``, marked ``thorough``."""

from __future__ import annotations

import os

THOROUGH = "THOROUGH" in os.environ
