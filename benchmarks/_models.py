"""ResNet-50 and GPT-2 of plain torch modules, as a training script has them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms, and the way around them (He et al., arXiv:1512.03385)."""

    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        around = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + around)


class ResNet50(nn.Module):
    """161 parameters, 25.6 million elements with width 64: stride in the 3x3 convolution, as torchvision has it."""

    def __init__(self, width=64, classes=1000):
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        blocks, inputs = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = (width << stage) * Bottleneck.expansion
        self.features = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks)
        self.classifier = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


class GPTBlock(nn.Module):
    """Causal attention and a GELU network, each behind a norm and beside a residual."""

    def __init__(self, width, heads, norm):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019): 148 parameters, 124 million elements with the sizes of the smallest model.

    norm: class of the norms, made with the width alone.
    """

    def __init__(self, layers=12, width=768, heads=12, vocabulary=50257, context=1024, norm=nn.LayerNorm):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, norm) for _ in range(layers)))
        self.norm = norm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        return functional.linear(x, self.tokens.weight)
