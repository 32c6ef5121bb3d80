// What libapex_torch.so (the dispatcher library, 3a) offers to the Python module (3b).
#pragma once
#define APEX_TORCH_API __attribute__((visibility("default")))
