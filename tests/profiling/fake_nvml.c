/* A stand-in for the NVIDIA driver's libnvidia-ml.so.1, so that the real pynvml can be tested without a GPU.
 *
 * It has two GPUs; the second does not support reading its power. The environment variable FAKE_NVML_STATE names a file
 * that is read at every call, so a test plays a timeline by rewriting it. Its lines are
 *
 *     count N               number of GPUs, at most 8
 *     init CODE             what the start of the library returns
 *     GPU KEY VALUE         a value of a GPU: util, memutil, used, power (mW), temperature, clock, energy (mJ),
 *                           reasons, pcie (kB/s), nvlink (KiB), mig (number of slices)
 *     GPU handle CODE       what the search for the GPU returns
 *     GPU error CODE        every reading of the GPU returns this code
 *     GPU error_KEY CODE    the reading of one value returns this code
 *
 * While the environment variable FAKE_NVML_LOST is set, every reading says that the GPU fell off the bus. With
 * -DOLD_DRIVER the library lacks the newer calls, and has the reasons of low clocks under their older name. Layouts and
 * numbers are those of NVIDIA's nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };
enum { CLOCK_SM = 1, GPUS = 8, SLICES = 2 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct {
    unsigned int field, scope;
    long timestamp, latency;
    unsigned int type, result;
    union { double d; unsigned long long u; } value;
} Field;
typedef struct Gpu { char name[64], uuid[64]; int index, slice; } Gpu;

static Gpu gpus[GPUS], slices[GPUS][SLICES];
static int started;

/* Returns a value of the state file, or the default. */
static long long state(int gpu, const char *key, long long otherwise) {
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128], first[32], name[64];
    long long value, found = otherwise;
    while (file && fgets(line, sizeof line, file)) {
        if (gpu < 0 && sscanf(line, "%31s %lld", first, &value) == 2 && !strcmp(first, key)) found = value;
        if (gpu >= 0 && sscanf(line, "%31s %63s %lld", first, name, &value) == 3 && atoi(first) == gpu
            && first[0] >= '0' && first[0] <= '9' && !strcmp(name, key)) found = value;
    }
    if (file) fclose(file);
    return found;
}

static int reading(Gpu *gpu, const char *key) {
    char name[64];
    if (!started) return UNINITIALIZED;
    if (getenv("FAKE_NVML_LOST")) return GPU_IS_LOST;
    int code = (int)state(gpu->index, "error", SUCCESS);
    snprintf(name, sizeof name, "error_%s", key);
    return code ? code : (int)state(gpu->index, name, SUCCESS);
}

static long long value(Gpu *gpu, const char *key, long long of_first, long long of_second) {
    return state(gpu->index, key, gpu->index == 1 ? of_second : of_first);
}

int nvmlInitWithFlags(unsigned int flags) {
    static const char *letters = "abcdefgh";
    (void)flags;
    int code = (int)state(-1, "init", SUCCESS);
    if (code) return code;
    for (int i = 0; i < GPUS; i++) {
        gpus[i].index = i;
        strcpy(gpus[i].name, i == 1 ? "NVIDIA T4-TEST" : "NVIDIA A100-SXM4-40GB");
        snprintf(gpus[i].uuid, sizeof gpus[i].uuid, "GPU-%.1s%.1s%.1s%.1s%.1s%.1s%.1s%.1s-0000-0000-0000-000000000000",
                 letters + i, letters + i, letters + i, letters + i, letters + i, letters + i, letters + i, letters + i);
        for (int s = 0; s < SLICES; s++) {
            slices[i][s] = gpus[i];
            slices[i][s].slice = s + 1;
            strcpy(slices[i][s].name, "NVIDIA A100-SXM4-40GB MIG 3g.20gb");
            snprintf(slices[i][s].uuid, sizeof slices[i][s].uuid, "MIG-%d%d000000-0000-0000-0000-000000000000", i, s);
        }
    }
    started = 1;
    return SUCCESS;
}

int nvmlShutdown(void) { started = 0; return SUCCESS; }

const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "Some other error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) { *count = (unsigned int)state(-1, "count", 2); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Gpu **gpu) {
    if (index >= (unsigned int)state(-1, "count", 2)) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return (int)state((int)index, "handle", SUCCESS);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    for (int i = 0; i < (int)state(-1, "count", 2); i++)
        if (!strcmp(gpus[i].uuid, uuid) && state(i, "error", SUCCESS) != GPU_IS_LOST) { *gpu = &gpus[i]; return SUCCESS; }
    return NOT_FOUND;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned int *count) {
    *count = state(gpu->index, "mig", 0) ? SLICES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned int index, Gpu **slice) {
    if (index >= (unsigned int)state(gpu->index, "mig", 0)) return NOT_FOUND;
    *slice = &slices[gpu->index][index];
    return SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned int size) { snprintf(name, size, "%s", gpu->name); return SUCCESS; }
int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned int size) { snprintf(uuid, size, "%s", gpu->uuid); return SUCCESS; }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    memory->total = gpu->index == 1 ? 17179869184 : 42949672960;
    memory->used = gpu->slice ? 1000000 * gpu->slice : value(gpu, "used", 10737418240, 4294967296);
    memory->free = memory->total - memory->used;
    return reading(gpu, "used");
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *utilization) {
    utilization->gpu = (unsigned int)value(gpu, "util", 37, 83);
    utilization->memory = (unsigned int)value(gpu, "memutil", 5, 5);
    return gpu->slice ? NOT_SUPPORTED : reading(gpu, "util");
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned int *milliwatts) {
    *milliwatts = (unsigned int)value(gpu, "power", 250500, 0);
    return *milliwatts ? reading(gpu, "power") : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned int *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = (unsigned int)value(gpu, "temperature", 61, 45);
    return reading(gpu, "temperature");
}

int nvmlDeviceGetClockInfo(Gpu *gpu, int clock, unsigned int *mhz) {
    if (clock != CLOCK_SM) return INVALID_ARGUMENT;
    *mhz = (unsigned int)value(gpu, "clock", 1410, 585);
    return reading(gpu, "clock");
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
    *reasons = (unsigned long long)value(gpu, "reasons", 0, 1);
    return reading(gpu, "reasons");
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(gpu, reasons);
}

int nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, unsigned long long *millijoules) {
    *millijoules = (unsigned long long)value(gpu, "energy", 5000000, 0);
    return *millijoules ? reading(gpu, "energy") : NOT_SUPPORTED;
}

int nvmlDeviceGetPcieThroughput(Gpu *gpu, int direction, unsigned int *kilobytes) {
    *kilobytes = (unsigned int)value(gpu, "pcie", 2000, 3000) + (direction == 1 ? 500 : 0);
    return reading(gpu, "pcie");
}

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
    long long kibibytes = value(gpu, "nvlink", -1, -1);
    for (int i = 0; i < count; i++) {
        fields[i].result = kibibytes < 0 ? NOT_SUPPORTED : SUCCESS;
        fields[i].value.u = (unsigned long long)(fields[i].field == 138 ? kibibytes : 2 * kibibytes);
    }
    return reading(gpu, "nvlink");
}
#endif
