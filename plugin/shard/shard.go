// Package shard splits services by a hash of their host.
//
// The shard of a host, of n, is the first eight bytes of the SHA-256 of the
// host in lower case, as a big-endian number, modulo n. It depends on nothing
// else, so every replica, adapter and tool computes the same one. The package
// imports the standard library only.
package shard

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Max bounds the number of shards.
const Max = 65536

// Set is the shards First to Last of so many. The zero Set is everything.
type Set struct{ First, Last, Of int }

var errForm = errors.New(`must be a shard such as "3/16", the fourth of 16, or several such as "0-3/16"`)

// Parse returns the set that a text such as "3/16" or "0-3/16" names.
func Parse(text string) (Set, error) {
	part, of, ok := strings.Cut(text, "/")
	if !ok {
		return Set{}, errForm
	}
	first, last, ranged := strings.Cut(part, "-")
	if !ranged {
		last = first
	}
	var n [3]uint64
	for i, digits := range []string{first, last, of} {
		var err error
		if n[i], err = strconv.ParseUint(digits, 10, 31); err != nil {
			return Set{}, errForm
		}
	}
	s := Set{int(n[0]), int(n[1]), int(n[2])}
	if s == (Set{}) {
		return s, errForm // would be everything
	}
	return s, s.Validate()
}

// Validate returns why no host is in the set.
func (s Set) Validate() error {
	switch {
	case s == Set{}:
		return nil
	case s.Of < 1 || s.Of > Max:
		return fmt.Errorf("there are %d shards; must be 1 to %d", s.Of, Max)
	case s.Last >= s.Of:
		return fmt.Errorf("shard %d is out of range: of %d there are 0 to %d", s.Last, s.Of, s.Of-1)
	case s.First < 0 || s.First > s.Last:
		return fmt.Errorf("no shard is from %d to %d", s.First, s.Last)
	}
	return nil
}

// String returns the set in the form that [Parse] reads; "" is everything.
func (s Set) String() string {
	switch {
	case s == Set{}:
		return ""
	case s.First == s.Last:
		return fmt.Sprintf("%d/%d", s.First, s.Of)
	}
	return fmt.Sprintf("%d-%d/%d", s.First, s.Last, s.Of)
}

// All reports whether the set is everything.
func (s Set) All() bool { return s.Last-s.First+1 >= s.Of }

// Has reports whether a host is in the set.
func (s Set) Has(host string) bool {
	if s.All() {
		return true
	}
	n := Of(host, s.Of)
	return s.First <= n && n <= s.Last
}

// Overlaps reports whether a host may be in both sets.
func (s Set) Overlaps(o Set) bool {
	if s.All() || o.All() {
		return true
	}
	// A number with the remainders i and j exists if, and only if, they are
	// equal modulo the greatest common divisor of the divisors.
	divisor := s.Of
	for rest := o.Of; rest != 0; {
		divisor, rest = rest, divisor%rest
	}
	in := make([]bool, divisor)
	for i := s.First; i <= s.Last; i++ {
		in[i%divisor] = true
	}
	for i := o.First; i <= o.Last; i++ {
		if in[i%divisor] {
			return true
		}
	}
	return false
}

// Of returns the shard of a host, 0 to n-1.
func Of(host string, n int) int {
	sum := sha256.Sum256([]byte(strings.ToLower(host)))
	return int(binary.BigEndian.Uint64(sum[:]) % uint64(n))
}
