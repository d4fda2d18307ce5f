"""What is done to a batch of images on the device: crops, sizes, noise, MixUp and CutMix. All of it follows from seeds and row numbers."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inputs.rows import Batch
from utils import uniforms

SMALL = 48  # sides up to this are resized by matrix products on a CPU


def border_of(x: Tensor | np.ndarray) -> int:
    """Pixels by which a crop may be off."""
    return max(1, x.shape[-1] // 8)


def cropped(x: Tensor, index: Tensor, draws: np.ndarray, border: int, flip: bool) -> Tensor:
    """Rows `index` of x (N, C, H + 2 borders, W + 2 borders), each cut to (H, W) and mirrored by its own draws (B, 3), in one gather."""
    height, width = x.shape[2] - 2 * border, x.shape[3] - 2 * border
    top, left = (torch.from_numpy((draws[:, i] * (2 * border + 1)).astype(np.int64)) for i in (0, 1))
    ys = top[:, None] + torch.arange(height)  # (B, H)
    xs = left[:, None] + torch.arange(width)  # (B, W)
    if flip:
        xs = torch.where(torch.from_numpy(draws[:, 2] < 0.5)[:, None], xs.flip(1), xs)
    channels = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    ys, xs = ys.to(x.device)[:, None, :, None], xs.to(x.device)[:, None, None, :]
    return x[index[:, None, None, None], channels, ys, xs]  # (B, C, H, W)


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, with antialiasing where the image shrinks."""
    if x.device.type != "cpu" or max(x.shape[2:]) > SMALL:
        return F.interpolate(x, size, mode="bilinear", antialias=size[0] < x.shape[2] or size[1] < x.shape[3])
    # The same as two small matrix products, which a CPU does nearly twice as fast for small images.
    rows, columns = bilinear_matrix(x.shape[2], size[0]), bilinear_matrix(x.shape[3], size[1])  # (out, in) each
    return rows @ (x @ columns.T)


@functools.cache
def bilinear_matrix(old: int, new: int) -> Tensor:
    """What bilinear resizing of one side does, as a matrix (new, old)."""
    return F.interpolate(torch.eye(old)[None, None], (new, old), mode="bilinear", antialias=new < old)[0, 0]


def normals(seed: int, rows: np.ndarray, numbers: int, device: torch.device) -> Tensor:
    """(rows, numbers) standard normal draws, a function of (seed, row) alone (Box-Muller)."""
    half = (numbers + 1) // 2
    u = torch.from_numpy(uniforms(seed, rows, 2 * half)).to(device)  # (B, 2 * half)
    radius = torch.sqrt(-2 * torch.log1p(-u[:, :half]))
    angle = 2 * torch.pi * u[:, half:]
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), 1)[:, :numbers]


def mixup(batch: Batch, num_classes: int, mixup_alpha: float, cutmix_alpha: float, seed: int) -> Batch:
    """MixUp (arXiv 1710.09412) or CutMix (arXiv 1905.04899) of each row with its mirror in the batch; with both on, a coin decides."""
    if not (mixup_alpha or cutmix_alpha):
        return batch
    rng = np.random.default_rng(seed)
    cut = bool(cutmix_alpha) and batch.x.ndim == 4 and (not mixup_alpha or rng.random() < 0.5)
    alpha = cutmix_alpha if cut else (mixup_alpha or cutmix_alpha)
    keep = float(rng.beta(alpha, alpha))
    other = batch.x.flip(0)
    if cut:
        height, width = batch.x.shape[2:]
        h, w = round(height * (1 - keep) ** 0.5), round(width * (1 - keep) ** 0.5)
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        x = batch.x.clone()
        x[:, :, top : top + h, left : left + w] = other[:, :, top : top + h, left : left + w]
        keep = 1 - h * w / (height * width)
    else:
        x = keep * batch.x + (1 - keep) * other
    soft = F.one_hot(batch.target, num_classes).to(x.dtype)
    target = keep * soft + (1 - keep) * soft.flip(0)
    return replace(batch, x=x, target=target, index=torch.stack((batch.index, batch.index.flip(0)), 1))
