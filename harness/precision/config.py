"""Which number formats a run computes, reduces and keeps its parameters in."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import execution, numerics
from harness.errors import ConfigError

DTYPES = ("float32", "bfloat16")
FLOAT8 = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_hp")
LINEARS = ("none", *FLOAT8, "mxfp8")
# What torchao 0.18 has a product of groups of rows in, which is what experts multiply.
GROUPED = ("float8_rowwise", "mxfp8")
DEFAULT_FILTER = ("output",)


@dataclass
class PrecisionConfig:
    """Formats from coarse to fine: of the parameters, of what computes, and of what linears multiply."""

    param_dtype: str = numerics("float32")
    """Format of parameters and activations in forward and backward: float32 or bfloat16."""
    reduce_dtype: str = numerics("float32")
    """Format of the gradients while they are reduced over data-parallel ranks: float32 or bfloat16."""
    master_dtype: str = numerics("float32")
    """Format of the parameters that the optimizer updates, and of their gradients: float32 or bfloat16."""
    linear: str = numerics("none")
    """Format in which linears multiply: none (param_dtype); float8_tensorwise, float8_rowwise or mxfp8 (one
    scale for a tensor, a row or 32 values); float8_rowwise_hp (weight gradients in param_dtype). Experts of a
    mixture do in float8_rowwise and mxfp8."""
    filter_fqns: list[str] = numerics(factory=lambda: list(DEFAULT_FILTER))
    """Linears whose name contains one of these multiply in param_dtype all the same; and experts, by the name
    layers.N.moe.experts."""
    auto_filter_small_kn: bool = numerics(False)
    """So do linears too small to gain by it, as torchao measured tensorwise and rowwise on an H100. It has no
    such table for experts."""
    enable_fsdp_float8_all_gather: bool = numerics(False)
    """FSDP casts weights to float8 before it gathers them (tensorwise): half the bytes. The masters are
    rounded once then, and not through bfloat16 first, which changes the numbers slightly."""
    precompute_float8_dynamic_scale_for_fsdp: bool = execution(False)
    """With that: one reduction after an update gives the scales of all weights, not one for each. With tp it
    is done in any case."""
    emulate: bool = execution(False)
    """Round as float8 does and multiply in float32: for CPUs and GPUs without float8; slow."""

    @property
    def is_mixed(self) -> bool:
        """Whether computing needs copies of the parameters in another format."""
        return self.param_dtype != self.master_dtype

    @property
    def needs_fsdp(self) -> bool:
        """Whether FSDP has something to cast, even where nothing is sharded."""
        mixed_reduction = self.reduce_dtype != self.master_dtype and self.master_dtype != "float32"
        return self.is_mixed or mixed_reduction or self.enable_fsdp_float8_all_gather

    @property
    def block(self) -> int:
        """Every length that linears multiply over is a multiple of this."""
        return 32 if self.linear == "mxfp8" else 16

    @property
    def expert_block(self) -> int:
        """The same of experts: their widths are multiples of it, and each one's rows are padded to one.

        torchao 0.18 says 32 for mxfp8, but its kernel wants 128 (mxfp8_quantize_cutedsl_2d_1x32).
        """
        return 128 if self.linear == "mxfp8" else 16

    def validate(self) -> None:
        """Raises ConfigError for formats that are not known or do not go together."""
        for name in ("param_dtype", "reduce_dtype", "master_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"precision.{name}", getattr(self, name), "no such format", DTYPES)
        if self.linear not in LINEARS:
            raise ConfigError("precision.linear", self.linear, "no such format", LINEARS)
        if self.master_dtype == "bfloat16" and self.param_dtype == "float32":
            raise ConfigError(
                "precision.master_dtype",
                self.master_dtype,
                "computing in param_dtype=float32 on parameters rounded to bfloat16 gains nothing",
                "float32, or precision=bf16_full",
            )
        if self.linear == "none":
            self._refuse_options_of_float8()
        if self.enable_fsdp_float8_all_gather and self.linear != "float8_tensorwise":
            raise ConfigError(
                "precision.enable_fsdp_float8_all_gather",
                True,
                f"shards of a weight have one scale with float8_tensorwise, not with {self.linear}",
                "false, or precision.linear=float8_tensorwise",
            )
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            raise ConfigError(
                "precision.precompute_float8_dynamic_scale_for_fsdp",
                True,
                "the scales are those of weights gathered in float8",
                "false, or precision.enable_fsdp_float8_all_gather=true",
            )
        if self.auto_filter_small_kn and self.linear not in ("float8_tensorwise", "float8_rowwise"):
            raise ConfigError(
                "precision.auto_filter_small_kn",
                True,
                f"torchao has measured float8_tensorwise and float8_rowwise, not {self.linear}",
                "false, and precision.filter_fqns by name",
            )

    def _refuse_options_of_float8(self) -> None:
        """Raises ConfigError for what changes nothing as long as linears multiply in param_dtype."""
        options = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
        for name in (*options, "auto_filter_small_kn", "emulate"):
            if getattr(self, name):
                rule = "linears multiply in param_dtype, so it changes nothing"
                raise ConfigError(f"precision.{name}", True, rule, "false, or precision=float8_rowwise")
        if tuple(self.filter_fqns) != DEFAULT_FILTER:
            raise ConfigError(
                "precision.filter_fqns",
                self.filter_fqns,
                "linears multiply in param_dtype, so it changes nothing",
                f"[{','.join(DEFAULT_FILTER)}], or precision=float8_rowwise",
            )
