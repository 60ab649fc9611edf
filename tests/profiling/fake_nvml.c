/* A stand-in for the NVIDIA driver's libnvidia-ml.so.1, so that the real pynvml can be tested without a GPU.
 *
 * It has two GPUs; the second does not support reading its power. While the environment variable FAKE_NVML_LOST is set,
 * every reading says that the GPU fell off the bus. Layouts and numbers are those of NVIDIA's nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15, CLOCK_SM = 1 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct {
    const char *name, *uuid;
    Memory memory;
    unsigned int utilization_percent, power_milliwatts, temperature_celsius, sm_clock_mhz;
} Gpu;

static Gpu gpus[] = {
    {"NVIDIA A100-SXM4-40GB", "GPU-aaaaaaaa-0000-0000-0000-000000000000", {42949672960, 32212254720, 10737418240},
     37, 250500, 61, 1410},
    {"NVIDIA T4-TEST", "GPU-bbbbbbbb-0000-0000-0000-000000000000", {17179869184, 12884901888, 4294967296},
     83, 0, 45, 585},
};

static int reading(void) { return getenv("FAKE_NVML_LOST") ? GPU_IS_LOST : SUCCESS; }

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "Some other error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) { *count = sizeof gpus / sizeof *gpus; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Gpu **gpu) {
    if (index >= sizeof gpus / sizeof *gpus) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned int size) { snprintf(name, size, "%s", gpu->name); return SUCCESS; }
int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned int size) { snprintf(uuid, size, "%s", gpu->uuid); return SUCCESS; }
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) { *memory = gpu->memory; return reading(); }

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *utilization) {
    utilization->gpu = gpu->utilization_percent;
    utilization->memory = 5;
    return reading();
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned int *milliwatts) {
    if (!gpu->power_milliwatts) return NOT_SUPPORTED;
    *milliwatts = gpu->power_milliwatts;
    return reading();
}

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned int *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = gpu->temperature_celsius;
    return reading();
}

int nvmlDeviceGetClockInfo(Gpu *gpu, int clock, unsigned int *mhz) {
    if (clock != CLOCK_SM) return INVALID_ARGUMENT;
    *mhz = gpu->sm_clock_mhz;
    return reading();
}
