"""Protects our reading of RFC 9113: where h2 gives the same bytes another answer, a section must be named that decides."""

from __future__ import annotations

import pytest

from tests.rpc.http2 import second_opinion
from tests.rpc.http2.opinion_cases import CASES, DIFFERENCES, cases


@pytest.mark.slow
def test_every_difference_from_h2_is_explained_and_every_explanation_is_needed() -> None:
    try:
        second_opinion.h2_python()
    except second_opinion.NoSecondOpinion as reason:
        pytest.skip(str(reason))
    unexplained = {}
    needed = set()
    for name, (mine, other) in second_opinion.compare().items():
        difference = second_opinion.explanation(name, mine, other)
        if difference is None:
            unexplained[name] = mine, other
        else:
            needed.add(difference)
    assert unexplained == {}
    assert [difference.cases for difference in DIFFERENCES if difference not in needed] == []


def test_no_two_cases_have_the_same_name() -> None:
    assert len(list(cases())) == len(CASES) > 200
