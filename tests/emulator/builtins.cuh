// A stand-in for the built-ins: kernels are plain functions of their parameters that return an error's JSON, or null.
#pragma once
#include <megagen/emulate/abi.hpp>

using Kernel = const char* (*)(const void* params);
extern "C" void stand_in_register(const char* name, Kernel kernel);
#define MEGAGEN_EMULATED(name) \
    static const bool registered_##name = (stand_in_register(#name, name), true);
