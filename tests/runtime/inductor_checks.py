"""What two gloo processes check of the compiled executor."""

import torch
from process_toys import make, mse_graph, same, sgd, share


def trained(kind):
    graph = mse_graph(model := make(0), sgd(model), 2)
    graph.config.set_executor(kind)
    found = [x for step in range(3) for x in graph(*share(step)).values()]
    return found, graph.full_state_dict()["modules"]["model"]


def check_two_processes_train_as_the_reference_executor():
    (wanted, states), (found, ours) = trained("eager"), trained("inductor")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    same(ours, states)
