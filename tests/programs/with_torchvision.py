"""Import before what imports torchvision: PyPI's build needs CUDA's libraries, and a CPU build of torch has none.

Its Python part alone does for models; it wants to find the operators that it says more about.
"""

import torch

if not torch.backends.cuda.is_built():
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
