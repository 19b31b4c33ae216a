"""What an estimate of old latents does to one attention (kv-state 3.5)."""

import math

import msgspec
import torch
from torch import Tensor

from expertmesh.deploy.bench.codec_reader import Queries


class Errors(msgspec.Struct, kw_only=True):
    """Over real queries and rows, all heads and MLA layers.

    row_mse: squared error over squared length of all rows. logit_rms: of measured errors, in nats;
    logit_predicted: what they would be if errors had no direction (alpha |q| |e| / sqrt(d)).
    output: error of the attention output over its length; mean and 99th percentile of queries and
    heads.
    """

    row_mse: float
    logit_rms: float
    logit_predicted: float
    output_mean: float
    output_p99: float


def errors(queries: list[Queries], exact_LNW: Tensor, estimate_LNW: Tensor, sinks: int) -> Errors:
    """The first `sinks` rows are exact in both, so they count for the output only."""
    rank = queries[0].w_v_HvR.shape[2]
    squares: list[Tensor] = []
    predicted: list[Tensor] = []
    outputs: list[Tensor] = []
    for layer, exact, estimate in zip(
        queries, exact_LNW.float(), estimate_LNW.float(), strict=True
    ):
        wrong = (estimate - exact)[sinks:]
        q_NHC, scale = layer.q_NHC, layer.scale
        squares.append((scale * q_NHC @ wrong.T).square().flatten())
        lengths = q_NHC.square().sum(-1).mean() * wrong.square().sum(-1).mean()
        predicted.append(scale * scale * lengths / wrong.shape[1])
        right, read = (_attend(layer, rows, rank) for rows in (exact, estimate))
        outputs.append(((read - right).norm(dim=-1) / right.norm(dim=-1)).flatten())
    wrong = (estimate_LNW.float() - exact_LNW.float())[:, sinks:]
    relative = torch.cat(outputs)
    return Errors(
        row_mse=float(wrong.square().sum() / exact_LNW[:, sinks:].float().square().sum()),
        logit_rms=math.sqrt(float(torch.cat(squares).mean())),
        logit_predicted=math.sqrt(float(torch.stack(predicted).mean())),
        output_mean=float(relative.mean()),
        output_p99=float(relative.quantile(0.99)),
    )


def _attend(layer: Queries, rows: Tensor, rank: int) -> Tensor:
    """[n, H, v] over all rows."""
    weights = (layer.scale * layer.q_NHC @ rows.T).softmax(-1)
    return torch.einsum("nhr,hvr->nhv", weights @ rows[:, :rank], layer.w_v_HvR)
