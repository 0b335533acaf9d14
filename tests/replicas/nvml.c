/* libnvidia-ml.so.1 for nvidia-ml-py: a few devices, divided or not, and any answer that NVML's manual allows.
 *
 * From the NVML API Reference (13.0), by function:
 *   nvmlDeviceGetHandleByIndex      valid indices are below nvmlDeviceGetCount, in order of PCI bus ids
 *   nvmlDeviceGetHandleByUUID       NOT_FOUND where no device has it; MIG-<uuid> is an instance's
 *   nvmlDeviceGetMigMode            NOT_SUPPORTED where the device cannot be divided
 *   nvmlDeviceGetMigDeviceHandleByIndex   NOT_FOUND where no instance has the index; indices may have gaps
 *   nvmlDeviceGetDeviceHandleFromMigDeviceHandle   INVALID_ARGUMENT for a whole device (an H100 with driver 580.159.04);
 *                                   other drivers may answer NOT_FOUND or NOT_SUPPORTED
 *   nvmlDeviceGetComputeRunningProcesses   INSUFFICIENT_SIZE with the count where the array is too small, NO_PERMISSION for a
 *                                   divided device where the caller has no privileges: its instances are asked instead;
 *                                   the used memory is NVML_VALUE_NOT_AVAILABLE (-1) where the driver does not know it
 *   nvmlDeviceGetAttributes         instances alone: NOT_SUPPORTED for a whole device
 *   nvmlDeviceGetNumGpuCores, nvmlDeviceGetCudaComputeCapability   whole devices alone: INVALID_ARGUMENT else
 * fake_fail(name, code) lets a function answer `code` for the device of that number (-1: any). */
#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef struct { char name[96], uuid[96]; int major, minor, cores, units, mig, parent; unsigned long long total, free; } Device;
static Device devices[16];
static int count;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
static struct { int device; Process process; } running[16];
static unsigned running_count;
static struct { char name[64]; int code, device; } failing;
static char driver[80] = "580.65.06";

void fake_reset(void) { count = 0, running_count = 0; memset(&failing, 0, sizeof failing); strcpy(driver, "580.65.06"); }
void fake_driver(const char *text) { snprintf(driver, sizeof driver, "%s", text); }
void fake_fail(const char *name, int code, int device) { snprintf(failing.name, 64, "%s", name); failing.code = code; failing.device = device; }
/* mig: -1 cannot be divided, 0 is not, 1 is; parent >= 0: an instance of that device. */
void fake_add(const char *name, const char *uuid, int major, int minor, int cores, int units, int mig, int parent,
              unsigned long long total, unsigned long long free) {
    Device *d = &devices[count++];
    snprintf(d->name, 96, "%s", name), snprintf(d->uuid, 96, "%s", uuid);
    d->major = major, d->minor = minor, d->cores = cores, d->units = units, d->mig = mig, d->parent = parent;
    d->total = total, d->free = free;
}

void fake_free(int device, unsigned long long free) { devices[device].free = free; }

void fake_run(int device, unsigned pid, unsigned long long used) {
    unsigned at = 0;
    while (at < running_count && (running[at].device != device || running[at].process.pid != pid)) at++;
    running[at].device = device;
    running[at].process = (Process){pid, used, -1, -1};
    if (at == running_count) running_count++;
}

static int fails(const char *name, Device *d) {
    if (strcmp(name, failing.name)) return 0;
    return failing.device < 0 || (d && d - devices == failing.device) ? failing.code : 0;
}
#define CHECK(d) do { int code = fails(__func__, d); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned flags) { CHECK(0); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "an error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { CHECK(0); snprintf(out, n, "%s", driver); return OK; }

static int nth(int parent, unsigned index, Device **out) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent == parent && !index--) return *out = &devices[i], OK;
    return 1;
}
int nvmlDeviceGetCount_v2(unsigned *out) {
    CHECK(0);
    *out = 0;
    for (int i = 0; i < count; i++) *out += devices[i].parent < 0;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (nth(-1, index, out)) return INVALID_ARGUMENT;
    CHECK(*out);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    CHECK(0);
    for (int i = 0; i < count; i++)
        if (!strcmp(devices[i].uuid, uuid)) return *out = &devices[i], OK;
    return NOT_FOUND;
}
int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *later) {
    CHECK(d);
    if (d->mig < 0) return NOT_SUPPORTED;
    *now = *later = d->mig;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) { CHECK(d); *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    CHECK(d);
    return index && !nth(d - devices, index - 1, out) ? OK : NOT_FOUND; /* a gap at 0 */
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **out) {
    CHECK(d);
    if (d->parent < 0) return INVALID_ARGUMENT;
    *out = &devices[d->parent];
    return OK;
}
int nvmlDeviceGetAttributes_v2(Device *d, unsigned *out) {
    CHECK(d);
    if (d->parent < 0) return NOT_SUPPORTED;
    memset(out, 0, 9 * sizeof *out), *out = d->units;
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device *d, unsigned long long *out) {
    CHECK(d);
    out[0] = d->total, out[1] = d->free, out[2] = d->total - d->free;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *size, Process *out) {
    CHECK(d);
    if (d->mig == 1) return NO_PERMISSION;
    unsigned room = *size, found = 0;
    for (unsigned i = 0; i < running_count; i++) {
        if (&devices[running[i].device] != d) continue;
        if (found < room) out[found] = running[i].process;
        found++;
    }
    *size = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    CHECK(d);
    if (d->parent >= 0) return INVALID_ARGUMENT;
    *major = d->major, *minor = d->minor;
    return OK;
}
int nvmlDeviceGetNumGpuCores(Device *d, unsigned *out) {
    CHECK(d);
    if (d->parent >= 0) return INVALID_ARGUMENT;
    *out = d->cores;
    return OK;
}
int nvmlDeviceGetName(Device *d, char *out, unsigned n) { CHECK(d); snprintf(out, n, "%s", d->name); return OK; }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned n) { CHECK(d); snprintf(out, n, "%s", d->uuid); return OK; }
