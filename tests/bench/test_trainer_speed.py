"""The table of the Trainer beside transformers' own is made of medians of rounds in turns."""

from trainer_speed import SYSTEMS, Run, table


def test_a_ratio_is_of_medians_of_one_round_and_losses_are_compared() -> None:
    ours, theirs = SYSTEMS[3], SYSTEMS[0]
    runs = {
        theirs: [Run([1.0, 0.5], [2.0, 4.0, 3.0], 10_000_000), Run([1.0, 0.5], [1.0], 10_000_000)],
        ours: [Run([1.0, 0.5], [1.5], 5_000_000), Run([1.0, 0.51], [0.5], 5_000_000)],
    }
    row = next(line for line in table(runs).splitlines() if line.startswith(f"| {ours}"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [ours, "1000.0", "0.50 (0.50 to 0.50)", "5.0", "1e-02"]
