"""Residual networks: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385."""

from torch import nn


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Block(nn.Module):
    """Convolutions with a shortcut: two of 3 x 3, or with `bottleneck` 1 x 1, 3 x 3 and 1 x 1 to 4 x width."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        if not bottleneck:
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        layers = []
        for shape in sizes:
            layers += [conv(*shape), nn.BatchNorm2d(shape[1]), nn.ReLU(inplace=True)]
        self.residual = nn.Sequential(*layers[:-1])
        nn.init.zeros_(self.residual[-1].weight)  # at first a block does nothing
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.residual(x) + self.shortcut(x))


def resnet(blocks, width, classes, bottleneck=False, small_images=False):
    """(N, 3, H, W) -> (N, classes).

    Args:
        blocks: how many blocks each stage has; each stage halves the image and doubles the width.
        width: channels of the first stage.
        small_images: begin with one 3 x 3 convolution, for images of few pixels.
    """
    if small_images:
        layers = [conv(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    else:
        layers = [conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Block(channels, width << stage, stride, bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


OWN = {
    "small": dict(blocks=(1, 1, 1), width=16, small_images=True),
    "resnet18": dict(blocks=(2, 2, 2, 2), width=64),
    "resnet34": dict(blocks=(3, 4, 6, 3), width=64),
    "resnet50": dict(blocks=(3, 4, 6, 3), width=64, bottleneck=True),
}


def make(arch, classes):
    """A network by name: "small", or torchvision's where it is installed, else one of the above."""
    if arch != "small":
        try:
            from torchvision import models
        except ImportError:
            pass
        else:
            return models.get_model(arch, weights=None, num_classes=classes)
    if arch not in OWN:
        raise SystemExit(f"{arch} needs torchvision; without it there are: {', '.join(OWN)}")
    return resnet(classes=classes, **OWN[arch])
