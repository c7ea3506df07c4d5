"""Test that the mutants match the code and docs/guarantees.md. `python -m tests.adversarial.mutants` runs them."""

from __future__ import annotations

import ast

import pytest

from tests.adversarial.mutants import MUTANTS, ROOT, Mutant, applied, claim_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.test)
def test_it_changes_one_place_of_the_code_and_its_claim_names_tests(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    ast.parse(applied(mutant, text))
    assert claim_of(mutant)[1]
