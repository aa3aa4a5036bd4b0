"""What all tests share: reproducible hypothesis runs, and the reference data that not every checkout has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shardwise", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("shardwise")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of published measurements beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the reference data {folder} is not on this machine")
    return folder
