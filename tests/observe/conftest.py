"""Copies of state are tested through diagnoses, which are as short as those in tests/diagnose."""

from tests.diagnose.conftest import short as short
