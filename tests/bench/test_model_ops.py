"""Every signature of every op of real training steps keeps the law."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("expecttest", reason="the tools are those for PyTorch's operator samples")
from ops import MODELS, tally_model


@pytest.mark.parametrize("model", ["mlp", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS if m != "mlp")])
@pytest.mark.filterwarnings("ignore")
def test_a_models_step_keeps_the_law_in_every_signature(model):
    found = tally_model(model)
    assert found.split > 50
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.bare, "ops without a rule"
