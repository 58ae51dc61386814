"""What gloo processes check of ``full_parameters``, two along one axis or four along two."""

import torch
import torch.distributed as dist
from evaluation_toys import Eager, Evaluate, assert_same, batch, everyone, grid, row_of, share, steady_graph, steps
from torch import nn
from torch.distributed.tensor import DTensor

close = torch.testing.assert_close


def settings():
    """Where steps run, and at which stages."""
    return [(everyone(), 0), (everyone(), 3)] if dist.get_world_size() == 2 else [(grid(), 3)]


def held(graph):
    """Objects and memory that steps refer to."""
    tensors = [*graph.model.parameters(), *graph.model.buffers()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return [id(x) for x in tensors], [x.data_ptr() for x in local], [x.requires_grad for x in tensors]


def check_eager_code_sees_whole_plain_tensors_and_what_it_writes_is_the_next_steps_value():
    for placement, stage in settings():
        graph, eager = steady_graph(placement, stage), Eager()
        steps(graph, 0), eager.steps(0)
        before, program = held(graph), graph.program
        said = next(graph.model.parameters()).said = object()
        with graph.full_parameters():
            seen = [*graph.model.parameters(), *graph.model.buffers()]
            assert not any(isinstance(x, DTensor) for x in seen)
            assert graph.model.first.weight is graph.model.twin.weight
            assert [x.requires_grad for x in seen] == before[2] and next(graph.model.parameters()).said is said
            close(dict(graph.model.state_dict()), dict(eager.model.state_dict()), rtol=1e-9, atol=1e-9)
            graph.model.eval()
            graph.model(batch(9)[0]).sum().backward()
            graph.model.train()
        assert held(graph) == before
        own = {id(x) for group in graph.optimizer.param_groups for x in group["params"]}
        assert own == {id(x) for x in graph.model.parameters()} and set(map(id, graph.optimizer.state)) <= own
        steps(graph, 1), eager.steps(1)
        assert graph.program is program
        with graph.full_parameters():
            write(graph.model)
            graph.model.last.weight = nn.Parameter(graph.model.last.weight + 1)
        write(eager.model)
        eager.model.last.weight.data.add_(1)
        assert held(graph)[:2] == before[:2]
        assert not graph.model.last.bias.requires_grad and graph.model.first.weight is graph.model.twin.weight
        for model in (graph.model, eager.model):
            model.last.bias.requires_grad_(True)
        assert_same(graph, eager)
        steps(graph, 2), eager.steps(2)
        assert_same(graph, eager)


@torch.no_grad()
def write(model):
    model.first.weight[3:].mul_(0.5)
    model.frozen.bias.data.add_(1)
    model.norm.running_mean.fill_(0.25)
    model.last.bias.requires_grad_(False)


def check_an_evaluation_graph_follows_the_training():
    for placement, stage in settings():
        graph, eager = steady_graph(placement, stage), Eager()
        evaluate, again = Evaluate(graph.model, placement), Evaluate(graph.model, placement)
        again.config.enable_zero(stage=3)  # splits what is whole, and the training goes on with that
        for step in range(3):
            steps(graph, step), eager.steps(step)
            graph.model.eval(), eager.model.eval()
            with torch.no_grad():
                found = (again if step == 1 else evaluate)(share(placement, 9)[0])
                wanted = eager.model(batch(9)[0])
            close(found, wanted.chunk(placement.hierarchy[0])[row_of(placement)], rtol=1e-9, atol=1e-9)
            graph.model.train(), eager.model.train()
        assert_same(graph, eager)
        assert not evaluate.training and graph.training
