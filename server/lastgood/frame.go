package lastgood

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/klauspost/compress/zstd"
)

// A file starts with a head: magic, the versions of the frame format and of the
// items, four bytes each, and a checksum of these.
//
// A frame consists of its kind, its number in the file and the length of the
// payload, four bytes each, a checksum of these and of the payload, and the
// payload.
const (
	magic     = "isthmus-last-good\n"
	headSize  = len(magic) + 3*4
	frameHead = 4 * 4

	frameData   = 0x61746164 // "data": compressed items
	frameCommit = 0x74696d63 // "cmit": a commit as JSON
)

// formatVersion is the version of the frame format.
const formatVersion = 1

// Size limits of a frame in bytes.
const (
	dataSize = 256 << 10 // a frame is completed once it reaches this size
	maxData  = 8 << 20   // uncompressed
	maxFrame = 8 << 20   // compressed
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// commit is the payload of a commit frame. It completes the frames before it.
type commit struct {
	// Registries are indexed by the registry numbers of items.
	Registries []savedRegistry `json:"registries"`
	Time       time.Time       `json:"time"`
}

type savedRegistry struct {
	Name string `json:"name"`
	Type string `json:"type"`
	// AsOf is the last time at which the saved items were known to be current;
	// zero if the registry had not completed a first listing.
	AsOf time.Time `json:"as_of,omitzero"`
}

// appendHead appends the head of a file.
func appendHead(b []byte, items int) []byte {
	start := len(b)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, formatVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(items))
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

func appendFrame(b []byte, kind, number uint32, payload []byte) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(b, kind)
	b = binary.LittleEndian.AppendUint32(b, number)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	sum := crc32.Update(crc32.Checksum(b[start:], castagnoli), castagnoli, payload)
	return append(binary.LittleEndian.AppendUint32(b, sum), payload...)
}

// versionError is returned for a file written by another version.
type versionError struct{ format, items uint32 }

// Error implements error.
func (e *versionError) Error() string {
	return fmt.Sprintf("another version of isthmus wrote it (format %d.%d; this one reads %d.%d)", e.format, e.items, formatVersion, itemsVersion)
}

var errIncomplete = errors.New("it ends before everything was written to it once")

// contents is the intact part of a file.
type contents struct {
	data   [][]byte // compressed data frames up to the last commit
	commit commit
	size   int64  // bytes up to the end of the last commit
	first  int64  // bytes up to the end of the first commit
	frames uint32 // number of frames in size
	// damage describes the defect after the last commit, nil if there is none.
	damage error
}

// scan finds the longest sequence of intact frames that ends with a commit. The
// contents share memory with file.
func scan(file []byte) (contents, error) {
	var c contents
	if len(file) < headSize {
		return c, fmt.Errorf("it ends within its first %d bytes", headSize)
	}
	if string(file[:len(magic)]) != magic {
		return c, errors.New("it is damaged at byte 0, or no file of isthmus")
	}
	if crc32.Checksum(file[:headSize-4], castagnoli) != binary.LittleEndian.Uint32(file[headSize-4:]) {
		return c, errors.New("it is damaged within its first bytes")
	}
	v := versionError{binary.LittleEndian.Uint32(file[len(magic):]), binary.LittleEndian.Uint32(file[len(magic)+4:])}
	if v != (versionError{formatVersion, itemsVersion}) {
		return c, &v
	}
	var pending [][]byte
	at := headSize
	for number := uint32(0); at < len(file); number++ {
		rest := file[at:]
		if len(rest) < frameHead {
			c.damage = fmt.Errorf("it ends within a frame, at byte %d", len(file))
			break
		}
		kind, size := binary.LittleEndian.Uint32(rest), int(binary.LittleEndian.Uint32(rest[8:]))
		if size <= maxFrame && frameHead+size > len(rest) {
			c.damage = fmt.Errorf("it ends within a frame, at byte %d", len(file))
			break
		}
		if size > maxFrame || binary.LittleEndian.Uint32(rest[4:]) != number {
			c.damage = fmt.Errorf("it is damaged at byte %d", at)
			break
		}
		payload := rest[frameHead : frameHead+size]
		if crc32.Update(crc32.Checksum(rest[:12], castagnoli), castagnoli, payload) != binary.LittleEndian.Uint32(rest[12:]) {
			c.damage = fmt.Errorf("it is damaged between bytes %d and %d", at, at+frameHead+size)
			break
		}
		at += frameHead + size
		switch kind {
		case frameData:
			pending = append(pending, payload)
			continue
		case frameCommit:
			var next commit
			if err := json.Unmarshal(payload, &next); err != nil {
				c.damage = fmt.Errorf("it is damaged before byte %d: %w", at, err)
				break
			}
			if c.size == 0 {
				c.first = int64(at)
			}
			c.data, pending = append(c.data, pending...), nil
			c.commit, c.size, c.frames = next, int64(at), number+1
			continue
		default:
			c.damage = fmt.Errorf("it is damaged at byte %d: no frame begins with %#x", at, kind)
		}
		break
	}
	if c.size == 0 {
		if c.damage == nil {
			c.damage = errIncomplete
		}
		return c, c.damage
	}
	if c.damage == nil && pending != nil {
		c.damage = fmt.Errorf("its last %d bytes were not committed", int64(at)-c.size)
	}
	return c, nil
}

func newEncoder() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		panic(fmt.Sprintf("BUG: lastgood: %v", err)) // conflicting options
	}
	return e
}

func newDecoder(concurrency int) *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(concurrency), zstd.WithDecoderMaxMemory(maxData))
	if err != nil {
		panic(fmt.Sprintf("BUG: lastgood: %v", err)) // conflicting options
	}
	return d
}
