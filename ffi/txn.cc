#include "txn.h"

#include <cinttypes>
#include <cstdio>
#include <stdexcept>

namespace jax_xdna {
namespace {

// First two header words: format 0.1, device generation, 6 rows; columns, 1 row of memory tiles.
struct Header {
  uint32_t device, size;
};
constexpr Header HeaderOf(Arch arch) {
  return arch == Arch::kNpu1 ? Header{0x06030100, 0x104} : Header{0x06040100, 0x108};
}
constexpr size_t kHeaderWords = 4;

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIX64, value);
  return text;
}

[[noreturn]] void Refuse(size_t word, const std::string& what) {
  throw std::invalid_argument("instruction stream, word " + std::to_string(word) + ": " + what);
}

// A field of a word; its name and limit are in the error when the value is too large.
uint32_t Field(uint64_t value, uint64_t limit, int shift, const char* name) {
  if (value > limit) {
    throw std::invalid_argument(std::string(name) + " " + std::to_string(value) +
                                ", the limit is " + std::to_string(limit));
  }
  return static_cast<uint32_t>(value << shift);
}

void Append(std::vector<uint32_t>& out, const TxnOp& op) {
  const uint32_t kind = static_cast<uint32_t>(op.kind);
  const uint32_t bytes = 4 * static_cast<uint32_t>(op.words());
  switch (op.kind) {
    case TxnKind::kWrite:
      out.insert(out.end(), {kind, 0, op.address, 0, op.value, bytes});
      break;
    case TxnKind::kBlockWrite:
      if (op.block.empty()) throw std::invalid_argument("a block write of no words");
      out.insert(out.end(), {kind, 0, op.address, bytes});
      out.insert(out.end(), op.block.begin(), op.block.end());
      break;
    case TxnKind::kMaskWrite:
      out.insert(out.end(), {kind, 0, op.address, 0, op.value, op.mask, bytes});
      break;
    case TxnKind::kWait:
      out.insert(out.end(), {kind, bytes,
                             Field(static_cast<uint64_t>(op.column), 255, 16, "wait: column") |
                                 Field(static_cast<uint64_t>(op.row), 255, 8, "wait: row") |
                                 static_cast<uint32_t>(op.direction == Direction::kMm2s),
                             Field(static_cast<uint64_t>(op.channel), 255, 24, "wait: channel") |
                                 0x10100});  // one tile
      break;
    case TxnKind::kPatch:
      out.insert(out.end(), {kind, bytes, 0, 0, 0, 0, op.address, 0, op.argument, 0,
                             static_cast<uint32_t>(op.argument_offset),
                             static_cast<uint32_t>(op.argument_offset >> 32)});
      break;
  }
}

// The operation at `w`, of which `left` words are there. Reserved words are not looked at.
TxnOp Parse(const uint32_t* w, size_t left, size_t position) {
  TxnOp op;
  const auto need = [&](size_t words) {
    if (left < words) {
      Refuse(position, "the operation needs " + std::to_string(words) + " words, " +
                           std::to_string(left) + " are left");
    }
  };
  op.kind = static_cast<TxnKind>(w[0]);
  switch (w[0]) {
    case static_cast<uint32_t>(TxnKind::kWrite):
      need(6);
      op.address = w[2];
      op.value = w[4];
      return op;
    case static_cast<uint32_t>(TxnKind::kBlockWrite): {
      need(4);
      if (w[3] < 20 || w[3] % 4 != 0) {
        Refuse(position + 3, "a block write of " + std::to_string(w[3]) +
                                 " bytes; it takes 16 and at least one word");
      }
      need(w[3] / 4);
      op.address = w[2];
      op.block.assign(w + 4, w + w[3] / 4);
      return op;
    }
    case static_cast<uint32_t>(TxnKind::kMaskWrite):
      need(7);
      op.address = w[2];
      op.value = w[4];
      op.mask = w[5];
      return op;
    case static_cast<uint32_t>(TxnKind::kWait):
      need(4);
      op.column = static_cast<int>(w[2] >> 16 & 0xFF);
      op.row = static_cast<int>(w[2] >> 8 & 0xFF);
      op.direction = (w[2] & 1) != 0 ? Direction::kMm2s : Direction::kS2mm;
      op.channel = static_cast<int>(w[3] >> 24);
      return op;
    case static_cast<uint32_t>(TxnKind::kPatch):
      need(12);
      op.address = w[6];
      op.argument = w[8];
      op.argument_offset = w[10] | static_cast<uint64_t>(w[11]) << 32;
      return op;
    default:
      Refuse(position, "unknown operation " + Hex(w[0]));
  }
}

void CheckSame(const char* what, const std::array<uint32_t, 8>& known, const uint32_t* words) {
  for (size_t i = 0; i < known.size(); ++i) {
    if (known[i] != words[i]) {
      throw std::invalid_argument(std::string(what) + ", word " + std::to_string(i) + ": " +
                                  Hex(words[i]) + " sets fields that no stream here uses");
    }
  }
}

}  // namespace

uint32_t QueueEntry::Word(int descriptors) const {
  return Field(static_cast<uint64_t>(bd), static_cast<uint64_t>(descriptors) - 1, 0,
               "task: descriptor") |
         Field(static_cast<uint64_t>(repeats) - 1, kMaxRepeats - 1, 16, "task: repeats less one") |
         (token ? 1u << 31 : 0);
}

QueueEntry QueueEntry::FromWord(uint32_t word, int descriptors) {
  const QueueEntry entry{static_cast<int>(word & 63), static_cast<int>(word >> 16 & 0xFF) + 1,
                         word >> 31 != 0};
  if (entry.Word(descriptors) != word) {
    throw std::invalid_argument("task queue: unknown bits in " + Hex(word));
  }
  return entry;
}

std::array<uint32_t, 8> ShimBd::Words() const {
  constexpr uint64_t kStep = 1 << 20;  // strides are stored less one
  const bool linear = size0 == 0;
  return {
      length,
      static_cast<uint32_t>(address),
      Field(address >> 32, 0xFFFF, 0, "shim descriptor: address / 2^32"),
      linear ? 0
             : Field(size0, 1023, 20, "shim descriptor: size of the first dimension") |
                   Field(stride0 - 1, kStep - 1, 0, "shim descriptor: first stride less one"),
      static_cast<uint32_t>(burst) << 30 |
          (linear
               ? 0
               : Field(size1, 1023, 20, "shim descriptor: size of the second dimension") |
                     Field(stride1 - 1, kStep - 1, 0, "shim descriptor: second stride less one")),
      2u << 24 |  // cache attribute of every transfer
          (linear ? 0 : Field(stride2 - 1, kStep - 1, 0, "shim descriptor: third stride less one")),
      0,
      1u << 25};  // valid
}

ShimBd ShimBd::FromWords(const uint32_t* words) {
  ShimBd bd;
  bd.length = words[0];
  bd.address = words[1] | static_cast<uint64_t>(words[2]) << 32;
  bd.burst = static_cast<int>(words[4] >> 30);
  bd.size0 = words[3] >> 20 & 1023;
  bd.size1 = words[4] >> 20 & 1023;
  if (bd.size0 != 0) {
    bd.stride0 = (words[3] & 0xFFFFF) + 1;
    bd.stride1 = (words[4] & 0xFFFFF) + 1;
    bd.stride2 = (words[5] & 0xFFFFF) + 1;
  }
  CheckSame("shim descriptor", bd.Words(), words);
  return bd;
}

std::array<uint32_t, 8> MemoryBd::Words() const {
  std::array<uint32_t, 8> words{};
  words[0] = Field(length, (1 << 17) - 1, 0, "memory tile descriptor: words");
  if (steps > 1) {
    words[6] = Field(steps - 1, 63, 17, "memory tile descriptor: steps less one") |
               Field(stride - 1, (1 << 17) - 1, 0, "memory tile descriptor: stride less one");
  }
  words[7] = 1u << 31;  // valid
  if (acquire >= 0) {
    constexpr uint32_t kAtLeastOne = 0x7F;  // acquire "greater or equal" is stored negated
    words[7] |= 1u << 24 |                  // release: add 1
                Field(static_cast<uint64_t>(kOwnLocks + release), 127, 16, "lock") | 1u << 15 |
                kAtLeastOne << 8 |
                Field(static_cast<uint64_t>(kOwnLocks + acquire), 127, 0, "lock");
  }
  return words;
}

MemoryBd MemoryBd::FromWords(const uint32_t* words) {
  MemoryBd bd;
  bd.length = words[0];
  if (words[6] != 0) {
    bd.steps = (words[6] >> 17 & 63) + 1;
    bd.stride = (words[6] & 0x1FFFF) + 1;
  }
  if ((words[7] & 1u << 15) != 0) {
    bd.acquire = static_cast<int>(words[7] & 0xFF) - kOwnLocks;
    bd.release = static_cast<int>(words[7] >> 16 & 0xFF) - kOwnLocks;
  }
  CheckSame("memory tile descriptor", bd.Words(), words);
  return bd;
}

size_t TxnOp::words() const {
  switch (kind) {
    case TxnKind::kWrite:
      return 6;
    case TxnKind::kBlockWrite:
      return 4 + block.size();
    case TxnKind::kMaskWrite:
      return 7;
    case TxnKind::kWait:
      return 4;
    case TxnKind::kPatch:
      return 12;
  }
  return 0;
}

std::vector<uint32_t> EncodeTxn(const Txn& txn) {
  size_t words = kHeaderWords;
  for (const TxnOp& op : txn.ops) words += op.words();
  const Header header = HeaderOf(txn.arch);
  std::vector<uint32_t> out;
  out.reserve(words);
  out.insert(out.end(), {header.device, header.size, static_cast<uint32_t>(txn.ops.size()),
                         static_cast<uint32_t>(4 * words)});
  for (const TxnOp& op : txn.ops) Append(out, op);
  return out;
}

Txn DecodeTxn(const uint32_t* words, size_t count) {
  if (count < kHeaderWords) {
    Refuse(count, "the stream ends within its header of 4 words");
  }
  Txn txn;
  txn.arch = words[0] == HeaderOf(Arch::kNpu2).device ? Arch::kNpu2 : Arch::kNpu1;
  const Header header = HeaderOf(txn.arch);
  if (words[0] != header.device) {
    Refuse(0, "header " + Hex(words[0]) + " is neither npu1 (0x6030100) nor npu2 (0x6040100)");
  }
  if (words[1] != header.size) {
    Refuse(1, "array size " + Hex(words[1]) + ", this device has " + Hex(header.size));
  }
  if (words[3] != 4 * static_cast<uint64_t>(count)) {
    Refuse(3, "the header says " + std::to_string(words[3]) + " bytes, there are " +
                  std::to_string(4 * count));
  }
  std::vector<uint32_t> again;
  for (size_t at = kHeaderWords; at < count;) {
    txn.ops.push_back(Parse(words + at, count - at, at));
    again.clear();
    Append(again, txn.ops.back());
    for (size_t i = 0; i < again.size(); ++i) {
      if (again[i] != words[at + i]) {
        Refuse(at + i, Hex(words[at + i]) + " where this operation (word " + std::to_string(at) +
                           ") has " + Hex(again[i]));
      }
    }
    at += again.size();
  }
  if (txn.ops.size() != words[2]) {
    Refuse(2, "the header says " + std::to_string(words[2]) + " operations, there are " +
                  std::to_string(txn.ops.size()));
  }
  return txn;
}

}  // namespace jax_xdna
