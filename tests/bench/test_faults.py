"""Every kind of fault ends as ``bench/stress/faults.py`` says it must."""

import pytest
from stress.faults import FAULTS, WAYS, run_faults


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_faults_at_random_moments_end_in_a_named_error_and_no_wrong_number(way):
    table, total, bad = run_faults(1, 1, [3], [way])
    assert total == len(FAULTS) and not bad, table
