"""One set of results on the GPU, for comparing variants bit by bit: see gpu_check.py.

usage: python gpu_check_results.py FILE            computes and saves
       python gpu_check_results.py --compare FILE FILE [FILE ...]
"""

import sys

import torch


def compute():
    """{name: tensor} of a few steps of every optimizer over awkward shapes, and of a clipped gradient."""
    from apex import optimizers
    from apex.contrib.clip_grad import clip_grad_norm_

    results = {}
    shapes = [(3, 5), (1,), (0,), (1000, 33), (20011,), (4096,)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for name in optimizers.__all__:
            torch.manual_seed(1)
            params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in shapes]
            options = dict(lr=1e-2, weight_decay=0.1)
            if name in ("FusedSGD", "FusedLARS"):
                options["momentum"] = 0.9
            optimizer = getattr(optimizers, name)(params, **options)
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn_like(p)
                norm = clip_grad_norm_(params, 50.0)
                optimizer.step()
            key = f"{name} {dtype}"
            results[f"{key} norm"] = norm
            for i, p in enumerate(params):
                results[f"{key} parameter {i}"] = p.detach()
    return {name: tensor.cpu() for name, tensor in results.items()}


def compare(files):
    first, *others = ({"file": f, **torch.load(f, weights_only=True)} for f in files)
    different = 0
    for other in others:
        for name, tensor in first.items():
            if name == "file":
                continue
            if not torch.equal(_bytes(tensor), _bytes(other[name])):
                worst = (tensor.double() - other[name].double()).abs().max().item()
                print(f"{name}: {first['file']} and {other['file']} differ, at most {worst:.3g}")
                different += 1
    print(f"{len(first) - 1} tensors, {len(others)} comparisons, {different} differ")
    return bool(different)


def _bytes(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def main():
    if sys.argv[1] == "--compare":
        return compare(sys.argv[2:])
    import apex

    torch.save(compute(), sys.argv[1])
    print("served by", sorted({variant for _, variant in apex.served().items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
