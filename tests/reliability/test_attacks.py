"""Attacks, with a normal client beside each: it is served throughout, and what they took is back afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability import attacks


def test_every_attack_has_its_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert [one.name for one in attacks.ATTACKS if f"| {one.name}: {one.what} |" not in page] == []


@pytest.mark.slow
async def test_a_sample_of_the_attacks_costs_no_other_client_an_answer_and_leaves_nothing() -> None:
    reports = await attacks.run(attacks.SAMPLE, sample=True)
    assert [report.rounds for report in reports] == [1] * len(attacks.SAMPLE)
    assert all(report.served for report in reports)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_all_attacks_cost_no_other_client_an_answer_and_leave_nothing() -> None:
    reports = await attacks.run(attacks.ATTACKS)
    assert len(reports) == len(attacks.ATTACKS)
    assert all(report.served for report in reports)
