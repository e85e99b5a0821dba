"""CUDA autocast's op lists as data: which ops run in lower precision, which in fp32, which take the widest dtype.

Source: aten/src/ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`,
`AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE`, `AT_FORALL_PROMOTE`) and the CUDA block of autocast_mode.cpp, torch 2.13.
Checked: tests/trace/test_autocast.py, against the header and the registrations of the installed torch.
"""

LOWER_PRECISION: tuple[str, ...] = (
    *("_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"),
    *("conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul"),
    *("einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
)
"""Inputs are cast to autocast's dtype; casts of fp32 leaves that require grad are cached."""

FP32: tuple[str, ...] = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist"),
    *("pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d"),
    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Inputs are cast to fp32."""

FP32_BY_DTYPE: tuple[str, ...] = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
"""The op's own `dtype` argument is set to fp32 where the caller left it open."""

FP32_APPENDED: tuple[str, ...] = ("norm.Scalar", "norm.ScalarOpt_dim")
"""The op is replaced by its overload with a dtype, which is fp32."""

PROMOTE: tuple[str, ...] = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
)
"""Inputs are cast to the widest of their dtypes."""

UNREACHABLE: tuple[str, ...] = ("binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose")
"""Registered for CUDA besides the lists: a loss that only raises an error, and convolutions that no CPU tensor has."""


def cuda_ops() -> frozenset[str]:
    """Every aten op that CUDA autocast handles by one of the lists."""
    return frozenset((*LOWER_PRECISION, *FP32, *FP32_BY_DTYPE, *FP32_APPENDED, *PROMOTE))
