/* A CUDA driver for tests that have none: enough of libcuda.so.1 for KvikIO's host and bounce paths.
 *
 * "Device" memory is a range that the host cannot touch (PROT_NONE) with a second view of the same
 * pages: whatever reaches the range has gone through one of the copies below, as on a real device.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define OK 0
#define INVALID_VALUE 1
#define RANGES 64

typedef unsigned long long Address;

static struct { char *device, *host; size_t size; } ranges[RANGES];
static int range_count;
static volatile long copies, copied_bytes;

/* Return the second view of a device address, or NULL for host memory. */
static char *view(Address address) {
  for (int i = 0; i < range_count; i++) {
    Address begin = (Address)(uintptr_t)ranges[i].device;
    if (address >= begin && address < begin + ranges[i].size)
      return ranges[i].host + (address - begin);
  }
  return NULL;
}

/* For the tests: take device memory; *host is how the test looks at it. */
void *fake_device_alloc(size_t size, void **host) {
  int fd = memfd_create("fake-device", 0);
  if (range_count == RANGES || fd < 0 || ftruncate(fd, size)) return NULL;
  ranges[range_count].device = mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
  *host = ranges[range_count].host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ranges[range_count].size = size;
  close(fd);
  return ranges[range_count++].device;
}
long fake_copied_bytes(void) { return copied_bytes; }

static int copy(Address to, Address from, size_t size) {
  void *target = view(to), *source = view(from);
  memcpy(target ? target : (void *)(uintptr_t)to, source ? source : (void *)(uintptr_t)from, size);
  __sync_fetch_and_add(&copies, 1);
  __sync_fetch_and_add(&copied_bytes, size);
  return OK;
}

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 12000; return OK; } /* before batched copies */
int cuMemHostAlloc(void **p, size_t size, unsigned flags) {
  return posix_memalign(p, 4096, size) ? 2 : OK;
}
int cuMemFreeHost(void *p) { free(p); return OK; }
int cuMemHostRegister_v2(void *p, size_t size, unsigned flags) { return OK; }
int cuMemHostUnregister(void *p) { return OK; }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) {
  return copy(to, (Address)(uintptr_t)from, size);
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) {
  return copy((Address)(uintptr_t)to, from, size);
}
int cuMemcpyAsync(Address to, Address from, size_t size, void *stream) { return copy(to, from, size); }
int cuMemcpyBatchAsync(Address *to, Address *from, size_t *size, size_t n) {
  for (size_t i = 0; i < n; i++) copy(to[i], from[i], size[i]);
  return OK;
}
int cuMemAlloc_v2(Address *p, size_t size) {
  void *host;
  *p = (Address)(uintptr_t)fake_device_alloc(size, &host);
  return *p ? OK : 2;
}
int cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
  return copy((Address)(uintptr_t)to, from, size);
}
/* 1 context, 2 memory type (1 host, 2 device), 3 device pointer, 9 device ordinal */
int cuPointerGetAttribute(void *data, int attribute, Address p) {
  if (!view(p)) return INVALID_VALUE;
  if (attribute == 1) *(void **)data = (void *)1;
  else if (attribute == 2) *(unsigned *)data = 2;
  else if (attribute == 3) *(Address *)data = p;
  else if (attribute == 9) *(int *)data = 0;
  else return INVALID_VALUE;
  return OK;
}
int cuPointerGetAttributes(unsigned n, int *attributes, void **data, Address p) {
  for (unsigned i = 0; i < n; i++)
    if (cuPointerGetAttribute(data[i], attributes[i], p) && attributes[i] == 2)
      *(unsigned *)data[i] = 0; /* memory that the driver does not know */
  return OK;
}
int cuMemGetAddressRange_v2(Address *base, size_t *size, Address p) {
  for (int i = 0; i < range_count; i++) {
    Address begin = (Address)(uintptr_t)ranges[i].device;
    if (p >= begin && p < begin + ranges[i].size) {
      if (base) *base = begin;
      if (size) *size = ranges[i].size;
      return OK;
    }
  }
  return INVALID_VALUE;
}
int cuCtxCreate_v2(void **c, unsigned flags, int device) { *c = (void *)1; return OK; }
int cuCtxCreate_v4(void **c, void *p, unsigned flags, int device) { *c = (void *)1; return OK; }
int cuCtxDestroy_v2(void *c) { return OK; }
int cuCtxPushCurrent_v2(void *c) { return OK; }
int cuCtxPopCurrent_v2(void **c) { if (c) *c = (void *)1; return OK; }
int cuCtxSetCurrent(void *c) { return OK; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuDevicePrimaryCtxRetain(void **c, int device) { *c = (void *)1; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetCount(int *n) { *n = 1; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return OK; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR"; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the fake driver"; return OK; }
int cuStreamCreate(void **s, unsigned flags) { *s = (void *)1; return OK; }
int cuStreamDestroy_v2(void *s) { return OK; }
int cuStreamSynchronize(void *s) { return OK; }
int cuEventCreate(void **e, unsigned flags) { *e = (void *)1; return OK; }
int cuEventDestroy_v2(void *e) { return OK; }
int cuEventRecord(void *e, void *s) { return OK; }
int cuEventQuery(void *e) { return OK; }
int cuEventSynchronize(void *e) { return OK; }
int cuLaunchHostFunc(void *s, void (*call)(void *), void *data) { call(data); return OK; }
