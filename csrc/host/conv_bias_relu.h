#pragma once
#include "batchnorm.h"
#include "bias_activation.h"
