#include "driver.h"

#include <drm/amdxdna_accel.h>
#include <drm/drm.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "faults.h"

namespace virtual_npu {
namespace {

uint8_t* Pointer(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

template <typename Answer>
int Give(amdxdna_drm_get_info& query, const Answer& answer) {
  if (query.buffer_size < sizeof answer) return -ENOSPC;
  std::memcpy(Pointer(query.buffer), &answer, sizeof answer);
  query.buffer_size = sizeof answer;
  return 0;
}

int GetInfo(const Model& model, amdxdna_drm_get_info& query) {
  switch (query.param) {
    case DRM_AMDXDNA_QUERY_AIE_METADATA: {
      amdxdna_drm_query_aie_metadata metadata = {};
      metadata.col_size = 1 << 25;
      metadata.cols = static_cast<uint16_t>(model.columns);
      metadata.rows = 6;
      metadata.version = {model.arch == jax_xdna::Arch::kNpu1 ? 2u : 4u, 0};
      metadata.core = {4, 2, 2, 16, 0, {}};
      metadata.mem = {1, 1, 6, 64, 0, {}};
      metadata.shim = {1, 0, 2, 16, 0, {}};
      return Give(query, metadata);
    }
    case DRM_AMDXDNA_QUERY_FIRMWARE_VERSION:
      return Give(query, amdxdna_drm_query_firmware_version{1, 1, 2, 64});
    case DRM_AMDXDNA_GET_POWER_MODE:
      return Give(query, amdxdna_drm_get_power_mode{POWER_MODE_DEFAULT, {}});
    default:
      return -EOPNOTSUPP;
  }
}

int CreateBo(Memory& memory, amdxdna_drm_create_bo& arg) {
  if (arg.type == AMDXDNA_BO_SHARE && Fails("memory")) return -ENOMEM;
  if (arg.vaddr == 0) return memory.Create(arg.type, arg.size, nullptr, &arg.handle);
  amdxdna_drm_va_tbl table;
  std::memcpy(&table, Pointer(arg.vaddr), sizeof table);
  if (arg.size != 0 || table.num_entries != 1) return -EOPNOTSUPP;  // no imports, no lists
  amdxdna_drm_va_entry pages;
  std::memcpy(&pages, Pointer(arg.vaddr) + sizeof table, sizeof pages);
  return memory.Create(arg.type, pages.len, Pointer(pages.vaddr), &arg.handle);
}

}  // namespace

Driver::Driver(int file, const Model& model) : npu_(file, model) {}

int Driver::Ioctl(unsigned long request, void* data) {
  if (request == DRM_IOCTL_AMDXDNA_EXEC_CMD && Fails("gone")) gone_ = true;
  if (gone_) return -ENODEV;
  Memory& memory = npu_.memory();
  switch (request) {
    case DRM_IOCTL_AMDXDNA_GET_INFO:
      return GetInfo(npu_.model(), *static_cast<amdxdna_drm_get_info*>(data));
    case DRM_IOCTL_AMDXDNA_CREATE_BO:
      return CreateBo(memory, *static_cast<amdxdna_drm_create_bo*>(data));
    case DRM_IOCTL_AMDXDNA_GET_BO_INFO: {
      auto& arg = *static_cast<amdxdna_drm_get_bo_info*>(data);
      uint64_t map_offset = 0, address = 0;
      const int result = memory.Info(arg.handle, &map_offset, &address);
      arg.map_offset = map_offset;
      arg.xdna_addr = address;
      arg.vaddr = 0;
      return result;
    }
    case DRM_IOCTL_AMDXDNA_SYNC_BO: {
      const auto& arg = *static_cast<amdxdna_drm_sync_bo*>(data);
      return memory.Sync(arg.handle, arg.offset, arg.size);
    }
    case DRM_IOCTL_GEM_CLOSE:
      return memory.Close(static_cast<drm_gem_close*>(data)->handle);
    case DRM_IOCTL_AMDXDNA_CREATE_HWCTX: {
      auto& arg = *static_cast<amdxdna_drm_create_hwctx*>(data);
      if (Fails("context")) return -ENOSPC;
      const int result = npu_.CreateContext(static_cast<int>(arg.num_tiles), &arg.handle);
      arg.syncobj_handle = arg.handle;  // a number space of their own, but one for each context
      arg.umq_doorbell = ~uint32_t{0};
      return result;
    }
    case DRM_IOCTL_AMDXDNA_CONFIG_HWCTX: {
      const auto& arg = *static_cast<amdxdna_drm_config_hwctx*>(data);
      amdxdna_hwctx_param_config_cu units;
      amdxdna_cu_config unit;
      if (arg.param_type != DRM_AMDXDNA_HWCTX_CONFIG_CU ||
          arg.param_val_size < sizeof units + sizeof unit) {
        return -EINVAL;
      }
      std::memcpy(&units, Pointer(arg.param_val), sizeof units);
      std::memcpy(&unit, Pointer(arg.param_val) + sizeof units, sizeof unit);
      return units.num_cus == 1 ? npu_.Configure(arg.handle, unit.cu_bo) : -EINVAL;
    }
    case DRM_IOCTL_AMDXDNA_DESTROY_HWCTX:
      return npu_.DestroyContext(static_cast<amdxdna_drm_destroy_hwctx*>(data)->handle);
    case DRM_IOCTL_AMDXDNA_EXEC_CMD: {
      auto& arg = *static_cast<amdxdna_drm_exec_cmd*>(data);
      if (arg.type != AMDXDNA_CMD_SUBMIT_EXEC_BUF || arg.cmd_count != 1) return -EINVAL;
      uint64_t sequence = 0;
      const int result = npu_.Execute(arg.hwctx, static_cast<uint32_t>(arg.cmd_handles), &sequence);
      arg.seq = sequence;
      return result;
    }
    case DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT: {
      const auto& arg = *static_cast<drm_syncobj_timeline_wait*>(data);
      if (arg.count_handles != 1) return -EOPNOTSUPP;
      uint32_t handle;
      uint64_t point;
      std::memcpy(&handle, Pointer(arg.handles), sizeof handle);
      std::memcpy(&point, Pointer(arg.points), sizeof point);
      return npu_.Wait(handle, point, arg.timeout_nsec);
    }
    case DRM_IOCTL_SYNCOBJ_DESTROY:
      return 0;
    default:
      return -EOPNOTSUPP;
  }
}

}  // namespace virtual_npu
