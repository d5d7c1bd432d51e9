"""Quantize folders of safetensors as they are published, and decode what is stored.

Written without the harness's code: E4M3 is torch's, E2M1 and E8M0 are those of OCP Microscaling Formats 1.0.
"""

import json
import re

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST_E4M3 = 448.0
LARGEST_E2M1 = 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Linears of blocks, as DeepSeek and Qwen quantize them.
LINEARS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")
PACKED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")


def spread(scales, shape, block):
    """The scale of each value of a matrix, where blocks share one."""
    grid = scales.float().reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    rows = torch.arange(shape[0]) // block[0]
    columns = torch.arange(shape[1]) // block[1]
    return grid[rows][:, columns]


def to_fp8(weight_OI, block):
    """Values in float8_e4m3fn, and for each block the factor that gives the weight back."""
    rows = weight_OI.split(block[0])
    scales = torch.tensor(
        [[part.abs().max() / LARGEST_E4M3 for part in row.split(block[1], 1)] for row in rows]
    )
    return (weight_OI / spread(scales, weight_OI.shape, block)).to(torch.float8_e4m3fn), scales


def to_mxfp4(weight_EIO):
    """Blocks [E, O, I/32, 16] with the first value in the low bits, and exponents [E, O, I/32]."""
    groups = weight_EIO.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / LARGEST_E2M1).log2().ceil().clamp(-127, 127)
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def from_mxfp4(blocks, scales):
    """The weight [E, I, O] in float32."""
    bits = blocks.numpy()
    values = np.stack([E2M1[bits & 15], E2M1[bits >> 4]], axis=-1).reshape(*scales.shape, 32)
    weight = values * np.exp2(scales.numpy().astype(np.float64) - 127)[..., None]
    return torch.from_numpy(
        weight.reshape(*scales.shape[:-1], -1).swapaxes(1, 2).astype(np.float32)
    )


def rewrite(folder, tensors, quantization):
    """Write one file of tensors, and set quantization_config."""
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**content, "quantization_config": quantization})
    )


def stored_in(folder):
    """All tensors in a folder's files."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def quantize_fp8(
    folder,
    block,
    quantization=None,
    stored_as=Tensor.float,
):
    """Quantize the linears in a folder; return all tensors as they must be read, in float32.

    Args:
        folder: the folder.
        block: rows and columns that share a scale.
        quantization: quantization_config; DeepSeek's by default.
        stored_as: changes the scales before they are stored.
    """
    stored, expected = {}, {}
    for name, tensor in stored_in(folder).items():
        stored[name], expected[name] = tensor, tensor.float()
        if LINEARS.fullmatch(name):
            stored[name], scales = to_fp8(tensor.float(), block)
            stored[f"{name}_scale_inv"] = stored_as(scales)
            expected[name] = stored[name].float() * spread(
                stored[f"{name}_scale_inv"], tensor.shape, block
            )
    default = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    rewrite(folder, stored, quantization or {**default, "weight_block_size": list(block)})
    return expected


def quantize_mxfp4(folder):
    """Quantize GPT-OSS's experts in a folder; return all tensors as they must be read, in float32."""
    stored, expected = {}, {}
    for name, tensor in stored_in(folder).items():
        if PACKED.fullmatch(name):
            parts = to_mxfp4(tensor.float())
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = parts
            expected[name] = from_mxfp4(*parts)
        else:
            stored[name], expected[name] = tensor, tensor.float()
    names = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    rewrite(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": names})
    return expected
