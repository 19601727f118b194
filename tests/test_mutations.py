"""The mutants still fit the sources: each stands where it says, once."""

import pytest
from mutations import MUTANTS, ROOT, found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_fits_the_sources(mutant):
    found(ROOT, mutant)


def test_names_are_told_apart():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
