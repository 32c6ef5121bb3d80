// Types of what Python calls.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api.h"
