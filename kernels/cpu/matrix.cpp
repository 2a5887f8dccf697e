// Leave to use the matrix unit, which a process asks its system for once.
#include "matrix.h"

#if defined(__AMX_TILE__)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// 0 when the process may use all that this library was compiled for, else the system's error.
extern "C" int nova_ask_system() {
#if defined(__AMX_TILE__)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux 5.16: <asm/prctl.h>
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
#else
  return 0;
#endif
}
