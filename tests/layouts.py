"""Comparisons of layouts with one process."""

from __future__ import annotations

from harness.parity import Verdict


def require_agreement(verdict: Verdict, note: str = "") -> None:
    """Fail with the layout, the parameter whose gradient differs most, and all relative differences."""
    assert verdict.passed, (
        f"{verdict.layout} on {verdict.ranks} ranks differs from one process; relative differences: "
        f"loss {verdict.loss:.1e}, gradient of {verdict.worst_parameter} {verdict.gradient:.1e}, "
        f"norm of the gradients {verdict.norm:.1e}{note and f' ({note})'}"
    )
