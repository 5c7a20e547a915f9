"""Headless Chromium, for tests of pages."""

import shutil

import pytest

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium or Chrome on the PATH"
)
PHONE = 390  # pixels
