"""One set of results on the GPU, for comparing variants bit by bit: see gpu_check.py.

usage: python gpu_check_results.py FILE            computes and saves
       python gpu_check_results.py --compare FILE FILE [FILE ...]
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compute():
    """{name: tensor} of everything below, on the CPU."""
    return {name: tensor.cpu() for name, tensor in (optimizer_steps() | functional_ops()).items()}


def optimizer_steps():
    """A few steps of every fused optimizer over awkward shapes, and clipped gradients."""
    from apex import optimizers
    from apex.contrib.clip_grad import clip_grad_norm_

    results = {}
    shapes = [(3, 5), (1,), (0,), (1000, 33), (20011,), (4096,)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for name in (n for n in optimizers.__all__ if n.startswith("Fused")):
            torch.manual_seed(1)
            params = [torch.nn.Parameter(torch.randn(s, device=DEVICE).to(dtype)) for s in shapes]
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
    return results


def functional_ops():
    """Outputs and gradients of every family of functional ops, over rows that vectors fit and rows that none fits."""
    from apex.contrib.focal_loss.focal_loss import focal_loss
    from apex.contrib.index_mul_2d import index_mul_2d
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
    from apex.normalization import FusedLayerNorm, FusedRMSNorm
    from apex.parallel import SyncBatchNorm
    from apex.transformer.functional import fused_apply_rotary_pos_emb, fused_bias_swiglu
    from apex.transformer.functional.fused_softmax import scaled_masked_softmax

    results = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for hidden in (1024, 1030):
            torch.manual_seed(1)

            def random(*shape, dtype=dtype):
                return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()

            labels = torch.randint(1, hidden, (37,), device=DEVICE)
            mask = torch.rand(2, 1, 9, hidden, device=DEVICE) < 0.2
            x, halves, heads = random(37, hidden), random(37, 2 * hidden), random(2, 3, 9, hidden)
            boxes, classes = random(3, 50, 12), torch.randint(-2, 11, (3, 50), device=DEVICE)
            index = torch.randint(0, 37, (50,), device=DEVICE)
            cases = {
                "layer norm": (x, FusedLayerNorm(hidden).to(DEVICE).to(dtype)(x)),
                "rms norm": (x, FusedRMSNorm(hidden).to(DEVICE).to(dtype)(x)),
                "softmax": (heads, scaled_masked_softmax(heads, mask, 0.5)),
                "rotary": (
                    heads,
                    fused_apply_rotary_pos_emb(heads, random(2, 1, 1, 64, dtype=torch.float32)),
                ),
                "bias swiglu": (halves, fused_bias_swiglu(halves, random(2 * hidden))),
                "cross entropy": (x, SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, 0)),
                "index_mul_2d": (x, index_mul_2d(x, random(50, hidden), index)),
                "focal loss": (
                    boxes,
                    focal_loss(boxes, classes, torch.ones(1, device=DEVICE), 11, 0.25, 2.0),
                ),
                "batch norm": (heads, SyncBatchNorm(3).to(DEVICE)(heads)),
            }
            for name, (leaf, output) in cases.items():
                torch.manual_seed(2)
                (gradient,) = torch.autograd.grad(output, leaf, torch.randn_like(output))
                key = f"{name} {dtype} {hidden}"
                results |= {f"{key} output": output.detach(), f"{key} gradient": gradient}
    return results


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
