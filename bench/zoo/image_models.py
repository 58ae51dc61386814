"""Models of images: one of each module of timm and of torchvision, on small images and with few layers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import smooth
from zoo.tiny_configs import shrunk_arguments
from zoo.trial import Skip, Trial

BATCH, CLASSES = 4, 10
SMALL = (
    "^test_", "atto", "femto", "pico", "zepto", "nano", "xxs", "xxtiny", "_050", "xs", "tiny", "[a-z]0", "small", "18",
    "26", "_s",
)  # fmt: skip
SIZES = (64, 96, 128, 224, 256)

TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_16", "maxvit_t", "fcn_resnet50",
    "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "raft_small", "mc3_18", "r3d_18", "r2plus1d_18", "s3d",
    "swin3d_t", "mvit_v2_s", "retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
)  # fmt: skip


class Classified(nn.Module):
    """A classifier with its loss; outputs that are not scores of classes count by their mean sine."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.body(x)
        if isinstance(found, Tensor) and found.dim() == 2:
            return F.cross_entropy(found, y)
        return smooth(found)


def images(*shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda step: {"x": torch.randn(BATCH, *shape), "y": torch.randint(0, CLASSES, (BATCH,))}


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    found: dict[str, tuple[str, Callable[[], Trial]]] = {}
    if importlib.util.find_spec("timm"):
        import timm

        for module in timm.list_modules():
            names = timm.list_models(module=module)
            if names:
                name = min(
                    names,
                    key=lambda name: next((i for i, text in enumerate(SMALL) if re.search(text, name)), len(SMALL)),
                )
                found[f"timm/{module}/{name}"] = ("timm", lambda name=name: of_timm(name))
    if importlib.util.find_spec("torchvision"):
        for name in TORCHVISION:
            found[f"torchvision/{name}"] = ("torchvision", lambda name=name: of_torchvision(name))
    return found


def of_timm(name: str) -> Trial:
    """The model with few layers and narrow ones, or, where its parts do not fit then, with few layers, or as it is."""
    import timm

    module = importlib.import_module(timm.model_entrypoint(name).__module__)
    builder = getattr(module, "build_model_with_cfg", None)
    reasons = []
    for narrow, flat in ((True, True), (False, True), (False, False)):
        for size in SIZES:
            try:
                with patch.object(module, "build_model_with_cfg", shrinking(builder, narrow, flat)):
                    model = _timm(timm, name, size)
                with torch.no_grad():
                    model.eval()(torch.randn(2, 3, size, size))
                return Trial(Classified(model), images(3, size, size))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
    raise Skip(reasons[-1])


def _timm(timm: Any, name: str, size: int) -> nn.Module:
    try:
        return timm.create_model(name, num_classes=CLASSES, img_size=size)
    except TypeError:
        return timm.create_model(name, num_classes=CLASSES)


def shrinking(builder: Any, narrow: bool, flat: bool) -> Any:
    def build(model_class: Any, variant: str, pretrained: bool, **given: Any) -> nn.Module:
        return builder(model_class, variant, pretrained, **(shrunk_arguments(given, narrow) if flat else given))

    return build


def of_torchvision(name: str) -> Trial:
    import torchvision

    if re.search("retinanet|fcos|ssd|rcnn", name):
        return detector(name)
    if name in ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v2_s"):
        return video(name)
    if name == "raft_small":
        return flow(name)
    given: dict[str, Any] = {"num_classes": CLASSES, "weights": None}
    size = 64
    if name == "vit_b_16":
        model = torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=CLASSES)
    elif name == "maxvit_t":
        model = torchvision.models.MaxVit((64, 64), 16, 8, 2, [16, 32], [1, 1], 0.0, num_classes=CLASSES)
    else:
        if re.match("fcn|deeplab|lraspp", name):
            given["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            given["init_weights"] = False
            size = 96
        model = torchvision.models.get_model(name, **given)
    if name in ("alexnet", "vgg11_bn"):
        slim(model)
    return Trial(Classified(model), images(3, size, size))


def slim(model: nn.Module) -> None:
    """A narrow classifier in the place of one that has nearly all of the parameters."""
    linear = [at for at, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    widths = [model.classifier[linear[0]].in_features, 32, 32, CLASSES]
    for at, before, after in zip(linear, widths, widths[1:], strict=False):
        model.classifier[at] = nn.Linear(before, after)


def video(name: str) -> Trial:
    import torchvision

    if name == "mvit_v2_s":
        raise Skip("takes images of 224 pixels in 16 frames only: too large here")
    model = torchvision.models.get_model(name, num_classes=CLASSES, weights=None)
    frames = 16 if name == "s3d" else 4
    size = 64 if name == "s3d" else 32
    return Trial(Classified(model), images(3, frames, size, size))


def flow(name: str) -> Trial:
    import torchvision

    model = torchvision.models.get_model(name, weights=None)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return smooth(self.body(x, z, num_flow_updates=2))

    return Trial(Flow(), lambda step: {"x": torch.randn(BATCH, 3, 128, 128), "z": torch.randn(BATCH, 3, 128, 128)})


def detector(name: str) -> Trial:
    import torchvision

    given = {"num_classes": CLASSES, "weights": None, "weights_backbone": None}
    sizes = {"min_size": 64, "max_size": 64} if "ssd" not in name else {}
    model = torchvision.models.get_model(name, **given, **sizes)

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor, boxes: Tensor, y: Tensor) -> Tensor:
            targets = [{"boxes": b, "labels": c} for b, c in zip(boxes.unbind(), y.unbind(), strict=True)]
            return torch.stack(list(self.body(list(x.unbind()), targets).values())).sum()

    def draw(step: int) -> dict[str, Tensor]:
        low = 30 * torch.rand(BATCH, 2, 2)
        boxes = torch.cat([low, low + 8 + 24 * torch.rand(BATCH, 2, 2)], -1)
        return {"x": torch.rand(BATCH, 3, 64, 64), "boxes": boxes, "y": torch.randint(1, CLASSES, (BATCH, 2))}

    return Trial(Detector(), draw)
