"""Number formats of parameters, computation and reductions."""

from dataclasses import dataclass

from harness.config.fields import Switch, execution, numerics
from harness.util.errors import ConfigError

DTYPES = ("float32", "bfloat16")
FLOAT8 = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_hp")
LINEARS = ("none", *FLOAT8, "mxfp8")
# Formats in which torchao 0.18 has a grouped matrix product, which experts need.
GROUPED = ("float8_rowwise", "mxfp8")
DEFAULT_FILTER = ("output",)
LINEAR = Switch("precision.linear", "precision=float8_rowwise", lambda linear: linear != "none")
GATHER = Switch("precision.enable_fsdp_float8_all_gather")


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats of the parameters, of computation and of the products of linears."""

    param_dtype: str = numerics("float32", choices=DTYPES)
    """Format of parameters and activations in forward and backward: float32 or bfloat16."""
    reduce_dtype: str = numerics("float32", choices=DTYPES)
    """Format in which gradients are reduced over data-parallel ranks: float32 or bfloat16."""
    master_dtype: str = numerics("float32", choices=DTYPES)
    """Format of the parameters that the optimizer updates, and of their gradients: float32 or
    bfloat16."""
    linear: str = numerics("none", choices=LINEARS)
    """Format in which linears multiply: none (param_dtype); float8_tensorwise, float8_rowwise or
    mxfp8 (one scale per tensor, row or 32 values); float8_rowwise_hp (weight gradients in
    param_dtype). Experts use it with float8_rowwise and mxfp8 only."""
    filter_fqns: list[str] = numerics(factory=lambda: list(DEFAULT_FILTER), needs=LINEAR)
    """Linears whose name contains one of these stay in param_dtype. Experts are named
    layers.N.moe.experts."""
    auto_filter_small_kn: bool = numerics(False, needs=LINEAR)
    """Keep linears in param_dtype if they are too small to gain, by torchao's measurements of
    tensorwise and rowwise on an H100. Experts are not filtered: torchao has no measurements for
    them."""
    enable_fsdp_float8_all_gather: bool = numerics(False, needs=LINEAR)
    """Let FSDP cast weights to float8 before it gathers them (tensorwise): half the bytes. Master
    weights are then cast directly instead of through bfloat16, which changes the numbers
    slightly."""
    precompute_float8_dynamic_scale_for_fsdp: bool = execution(False, needs=(LINEAR, GATHER))
    """With enable_fsdp_float8_all_gather: compute the scales of all weights in one reduction after
    an update instead of one per weight. Always done with tp."""
    emulate: bool = execution(False, needs=LINEAR)
    """Round to float8 and multiply in float32: for CPUs and GPUs without float8; slow."""

    @property
    def needs_fsdp(self) -> bool:
        """Whether FSDP has something to cast, even where nothing is sharded."""
        mixed_reduction = self.reduce_dtype != self.master_dtype and self.master_dtype != "float32"
        mixed = self.param_dtype != self.master_dtype or mixed_reduction
        return mixed or self.enable_fsdp_float8_all_gather

    @property
    def block(self) -> int:
        """Every dimension of a linear's product must be a multiple of this."""
        return 32 if self.linear == "mxfp8" else 16

    @property
    def expert_block(self) -> int:
        """The same for experts: widths must be multiples of it, and each expert's rows are padded to one.

        torchao 0.18 documents 32 for mxfp8, but its kernel needs 128
        (mxfp8_quantize_cutedsl_2d_1x32).
        """
        return 128 if self.linear == "mxfp8" else 16

    def validate(self) -> None:
        if self.master_dtype == "bfloat16" and self.param_dtype == "float32":
            rule = (
                "computing in param_dtype=float32 on parameters rounded to bfloat16 gains nothing"
            )
            works = "float32, or precision=bf16_full"
            raise ConfigError("precision.master_dtype", self.master_dtype, rule, works)
        if self.linear == "none":
            return
        if self.enable_fsdp_float8_all_gather and self.linear != "float8_tensorwise":
            rule = f"needs one scale for all shards of a weight, which {self.linear} does not have"
            works = "false, or precision.linear=float8_tensorwise"
            raise ConfigError("precision.enable_fsdp_float8_all_gather", True, rule, works)
        if self.auto_filter_small_kn and self.linear not in ("float8_tensorwise", "float8_rowwise"):
            rule = f"torchao has measurements of float8_tensorwise and float8_rowwise, not of {self.linear}"
            works = "false, and precision.filter_fqns by name"
            raise ConfigError("precision.auto_filter_small_kn", True, rule, works)
