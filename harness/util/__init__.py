"""Text, tables, files, locks and facts of hardware, for every room. Imports nothing of the harness."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""
