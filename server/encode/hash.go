package encode

import (
	"crypto/sha256"
	"encoding/binary"
)

// Hash is a content hash that adds up: the sum of the hashes of parts, modulo
// 2^64, is the hash of their set. Versions of one name are compared with each
// other only, so 64 bits are plenty.
type Hash uint64

// String returns the hash as a version: 16 hexadecimal digits.
func (h Hash) String() string {
	var b [hashDigits]byte
	return string(h.Append(b[:0]))
}

// hashDigits is the length of a hash as text.
const hashDigits = 16

// Append appends the hash as [Hash.String] writes it.
func (h Hash) Append(b []byte) []byte {
	const digits = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		b = append(b, digits[h>>shift&0xf])
	}
	return b
}

// Is reports whether s is the hash as text. It does not allocate.
func (h Hash) Is(s string) bool {
	var b [hashDigits]byte
	return string(h.Append(b[:0])) == s
}

// HashOf hashes the parts as one; where one ends and the next begins counts.
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
