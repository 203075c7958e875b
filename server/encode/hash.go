package encode

import (
	"crypto/sha256"
	"encoding/binary"
)

// Hash is an additive content hash: the hash of a set is the sum of the hashes
// of its parts, modulo 2^64. Only versions of one name are compared, so 64 bits
// suffice.
type Hash uint64

// String returns the hash as a version: 16 hexadecimal digits.
func (h Hash) String() string {
	var b [hashDigits]byte
	return string(h.Append(b[:0]))
}

// hashDigits is the length of a hash as text.
const hashDigits = 16

// Append appends the hash in the format of [Hash.String].
func (h Hash) Append(b []byte) []byte {
	const digits = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		b = append(b, digits[h>>shift&0xf])
	}
	return b
}

// Is reports whether s is the text of the hash. It does not allocate.
func (h Hash) Is(s string) bool {
	var b [hashDigits]byte
	return string(h.Append(b[:0])) == s
}

// HashOf hashes parts together; their boundaries matter.
func HashOf(parts ...[]byte) Hash {
	sum := sumOf(parts...)
	return Hash(binary.BigEndian.Uint64(sum[8:]))
}

func sumOf(parts ...[]byte) (sum [sha256.Size]byte) {
	d := sha256.New()
	for _, p := range parts {
		writePart(d.Write, len(p), p)
	}
	d.Sum(sum[:0])
	return sum
}

func writePart(write func([]byte) (int, error), size int, pieces ...[]byte) {
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], uint64(size))
	_, _ = write(n[:]) // a hash.Hash never returns an error
	for _, p := range pieces {
		_, _ = write(p)
	}
}
