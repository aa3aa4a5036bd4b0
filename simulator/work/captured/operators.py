"""Names of torch's operators (ATen, torch 2.13: native_functions.yaml) by what their kernels do; without a trailing underscore."""

from __future__ import annotations

from typing import Final

POINTWISE: Final = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "where", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min",
    "clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "masked_fill", "addcmul", "addcdiv",
    "lerp", "square", "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "floor_divide", "isnan",
    "isinf", "isfinite", "isneginf", "isposinf", "nan_to_num", "copysign", "heaviside", "threshold", "threshold_backward", "relu",
    "native_dropout", "native_dropout_backward", "_fused_dropout", "bernoulli", "normal", "uniform", "random", "exponential",
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "linspace", "eye", "randperm", "inductor_seeds",
    "mse_loss",
    "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "complex", "polar",
    "masked_scatter", "unfold_backward", "_conj_physical", "__and", "__or", "__xor", "__lshift", "__rshift", "__ilshift",
    "__irshift",
    "angle", "conj_physical", "deg2rad", "rad2deg", "frexp", "gcd", "lcm", "hypot", "ldexp", "nextafter", "signbit", "hardshrink",
    "hardshrink_backward", "softshrink", "softshrink_backward", "rrelu_with_noise", "rrelu_with_noise_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward", "cauchy", "geometric", "log_normal", "binomial", "poisson", "_masked_scale", "linalg_cross",
    "dequantize", "_fused_moving_avg_obs_fq_helper", "_assert_async", "_functional_assert_async", "addr",
}  # fmt: skip
ACTIVATIONS: Final = {
    "silu", "silu_backward", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "exp", "exp2",
    "acosh", "asinh", "atanh", "celu", "sinc", "logaddexp2", "i0", "digamma", "lgamma", "polygamma", "mvlgamma", "igamma",
    "igammac",
    "_standard_gamma", "_standard_gamma_grad", "_sample_dirichlet", "_dirichlet_grad", "log", "log1p", "log2", "log10", "sqrt",
    "rsqrt", "reciprocal", "pow", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "softplus", "softplus_backward", "erf", "erfc", "erfinv", "mish", "mish_backward", "elu", "elu_backward",
    "hardtanh", "hardtanh_backward", "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward", "leaky_relu",
    "leaky_relu_backward", "expm1", "log_sigmoid_forward", "log_sigmoid_backward", "logit", "logit_backward", "xlogy", "glu",
    "glu_backward", "_prelu_kernel", "_prelu_kernel_backward", "logaddexp", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "_amp_update_scale",
}  # fmt: skip
REDUCTIONS: Final = {
    "sum", "nansum", "mean", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "any", "all", "_is_all_true",
    "_is_any_true", "prod", "var", "var_mean",
    "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "count_nonzero", "_foreach_norm", "dot", "vdot", "mv", "addmv",
    "_weight_norm_interface", "_weight_norm_interface_backward", "linalg__powsum", "dist", "trace",
}  # fmt: skip
# a thread an element of the result, or of what is moved: what their arguments and results hold passes once
BY_BYTES: Final = {
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "histc", "bincount", "repeat_interleave", "roll", "flip", "repeat",
    "unique", "expand_backward", "masked_select", "searchsorted", "bucketize", "topk", "kthvalue", "diagonal_backward",
    "tril_indices", "triu_indices", "im2col", "col2im", "pixel_shuffle", "native_channel_shuffle", "channel_shuffle",
    "multinomial", "diag_embed", "median", "nanmedian", "mode", "isin",
    "nonzero", "nonzero_static", "unique_consecutive", "unique_dim", "pixel_unshuffle", "rot90", "renorm", "slice_scatter",
    "select_scatter",
    "diagonal_copy", "diagonal_scatter", "as_strided_scatter", "block_diag", "segment_reduce", "_segment_reduce_backward", "masked_scatter_backward",
    "lu_unpack", "histogram", "_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward", "hann_window",
    "hamming_window", "_unique2", "_pack_padded_sequence", "affine_grid_generator",
    "_cslt_compress", "_to_sparse_semi_structured", "_sparse_semi_structured_tile", "_sparse_semi_structured_apply",
    "_sparse_semi_structured_apply_dense", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward",
}  # fmt: skip
# beginnings of such names, of any number of dims and either direction: pools, other sizes, borders, transforms (short ones in one pass)
FAMILIES: Final = (
    "avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "max_unpool", "fractional_max_pool",
    "upsample_", "_upsample_",
    "grid_sampler_", "reflection_pad", "replication_pad", "special_", "fake_quantize_",
    "_fake_quantize_", "quantize_per_",
)  # fmt: skip
GATHERS: Final = {"take", "index", "gather", "index_select", "_unsafe_index", "_unsafe_masked_index"}
SCATTERS: Final = {
    "index_put", "_index_put_impl", "_unsafe_index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
    "scatter_reduce", "index_reduce", "_unsafe_masked_index_put_accumulate", "put", "index_select_backward", "gather_backward",
}  # fmt: skip
