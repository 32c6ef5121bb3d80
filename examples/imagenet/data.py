"""Images as uint8 tensors: a folder of folders, or scikit-learn's digits; and a prefetcher."""

from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SUFFIXES = {".jpeg", ".jpg", ".png", ".ppm", ".bmp", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for values in [0, 1]


class ImageFolder(Dataset):
    """`folder`/<class>/<image>, as uint8 (3, size, size) and the number of the class.

    train: a random part of each image, mirrored at random; else the middle.
    """

    def __init__(self, folder, size, train):
        self.size, self.train = size, train
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        self.images = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((Path(folder) / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.images:
            raise SystemExit(f"{folder} holds no images: expected {folder}/<class>/<image>")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.images[index]
        with Image.open(path) as image:
            image = image.convert("RGB")
            box = self._random_box(*image.size) if self.train else self._middle(*image.size)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.train and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1), label

    @staticmethod
    def _random_box(width, height):
        """8 to 100 % of the image, 3:4 to 4:3."""
        for _ in range(10):
            area = width * height * torch.empty(()).uniform_(0.08, 1.0).item()
            ratio = torch.empty(()).uniform_(-0.2877, 0.2877).exp().item()
            w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
            if w <= width and h <= height:
                left, top = torch.rand(()).item() * (width - w), torch.rand(()).item() * (height - h)
                return left, top, left + w, top + h
        return 0, 0, width, height

    @staticmethod
    def _middle(width, height):
        """7/8 of the shorter side."""
        side = min(width, height) * 0.875
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side


def digits(train):
    """Three quarters, or the last quarter, of scikit-learn's 1,797 digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    parts = train_test_split(data.images, data.target, test_size=0.25, random_state=0, stratify=data.target)
    images, labels = (parts[0], parts[2]) if train else (parts[1], parts[3])
    images = torch.tensor(images * (255 / 16)).to(torch.uint8).unsqueeze(1).expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.tensor(labels))


def loaders(folder, size, batch, workers, distributed):
    """(loader to train on, loader to validate on, number of classes)."""
    if folder is None:
        train, test, classes = digits(True), digits(False), 10
    else:
        train = ImageFolder(Path(folder) / "train", size, train=True)
        test, classes = ImageFolder(Path(folder) / "val", size, train=False), len(train.classes)
    made = []
    for dataset, training in ((train, True), (test, False)):
        sampler = DistributedSampler(dataset, shuffle=training, drop_last=training) if distributed else None
        made.append(
            DataLoader(
                dataset,
                batch,
                shuffle=training and not distributed,
                sampler=sampler,
                num_workers=workers,
                pin_memory=torch.cuda.is_available(),
                drop_last=training,  # a batch norm cannot train on one image
            )
        )
    return *made, classes


class Prefetcher:
    """Batches on the device, normalized there; on a GPU the next one is copied while this one is used."""

    def __init__(self, loader, device):
        self.loader, self.device = loader, device
        self.mean = torch.tensor(MEAN, device=device).view(3, 1, 1) * 255
        self.std = torch.tensor(STD, device=device).view(3, 1, 1) * 255
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        if self.stream is None:
            yield from map(self._prepare, self.loader)
            return
        ready = None
        for batch in self.loader:
            with torch.cuda.stream(self.stream):
                following = self._prepare(batch)
            if ready is not None:
                yield ready
            ready = self._take(following)
        if ready is not None:
            yield ready

    def _prepare(self, batch):
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        return (images.float() - self.mean) / self.std, labels

    def _take(self, batch):
        """Hands tensors of the side stream to the current one."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in batch:
            tensor.record_stream(current)
        return batch
