// Package saved encodes claims for the last good state.
//
// A run of items is self-contained: [Parse] reads what [Item.Append] wrote, and
// nothing else. Offsets are checked, so that they are within the buffer.
package saved

import (
	"encoding/binary"
	"errors"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Format is the version of the encoding. It changes with it, and with the input
// of content hashes.
const Format = 2

// Kind is what an item is.
type Kind byte

// Kinds of items.
const (
	Removal  Kind = iota // a collection, a name
	Plain                // a resource published unchanged
	Entry                // the ServiceEntry of a service
	Instance             // an instance of a service

	// more is added to the kind of a further claim on the same name. An item
	// without it replaces all claims on its name.
	more = 4
)

// Item is a claim, or the removal of a name from all registries.
type Item struct {
	Registry int  // number
	More     bool // does not replace the claims of other registries
	Kind     Kind
	Service  string // of an instance

	// A claim.

	URL                      string // of the body, which names the collection
	Traits                   byte
	Hash                     encode.Hash
	SpecAt, NameAt, NameLen  int
	AddressAt, AddressLength int
	Buf                      string

	Collection string
	Name       string // of a removal
}

// Append appends the encoded item.
func (it *Item) Append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(it.Registry)) //nolint:gosec // not negative
	flag := byte(0)
	if it.More {
		flag = more
	}
	b = append(b, byte(it.Kind)|flag)
	switch it.Kind {
	case Removal:
		return appendText(appendText(b, it.Collection), it.Name)
	case Instance:
		b = appendText(b, it.Service)
	}
	b = append(appendText(b, it.URL), it.Traits)
	b = binary.LittleEndian.AppendUint64(b, uint64(it.Hash))
	for _, n := range [...]int{it.SpecAt, it.NameAt, it.NameLen, it.AddressAt, it.AddressLength} {
		b = binary.AppendUvarint(b, uint64(n)) //nolint:gosec // not negative
	}
	return appendText(b, it.Buf)
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// ErrMalformed is returned for bytes that are not in the format.
var ErrMalformed = errors.New("malformed")

// reader reads the fields of items. After an error it returns zero values.
type reader struct {
	rest   []byte
	bad    bool
	bodies map[string]body // by URL
}

func (s *reader) number(limit uint64) int {
	n, size := binary.Uvarint(s.rest)
	if size <= 0 || n > limit {
		s.bad, s.rest = true, nil
		return 0
	}
	s.rest = s.rest[size:]
	return int(n) //nolint:gosec // within the limit
}

func (s *reader) bytes(n int) []byte {
	if n > len(s.rest) {
		s.bad, s.rest = true, nil
		return nil
	}
	b := s.rest[:n]
	s.rest = s.rest[n:]
	return b
}

func (s *reader) text() []byte { return s.bytes(s.number(2 * encode.MaxSize)) }

// again returns a text that is likely to be the one before.
func (s *reader) again(last *string) string {
	if b := s.text(); string(b) != *last {
		*last = string(b)
	}
	return *last
}

// body is a kind of message, of which there are few.
type body struct{ url, collection string }

func (s *reader) body() body {
	b := s.text()
	of, known := s.bodies[string(b)]
	if !known {
		of = body{string(b), collection.OfBody(string(b))}
		s.bodies[of.url] = of
	}
	return of
}

// fits reports whether a claim may be of its collection.
func (it *Item) fits() bool {
	switch it.Kind {
	case Entry:
		return it.Collection == collection.ServiceEntry
	case Instance:
		return it.Collection == collection.WorkloadEntry
	}
	return it.Collection != ""
}

// Parse calls f with each item of a run, whose strings are copies. It returns
// the error of f, or [ErrMalformed].
func Parse(run []byte, f func(*Item) error) error {
	s := reader{rest: run, bodies: make(map[string]body)}
	service := ""
	for len(s.rest) > 0 {
		it := Item{Registry: s.number(1<<16 - 2)}
		kind := s.number(uint64(Instance) | more)
		it.More, it.Kind = kind&more != 0, Kind(kind&^more) //nolint:gosec // at most 7
		if it.Kind == Removal {
			it.Collection, it.Name = string(s.text()), string(s.text())
			if s.bad || it.More {
				return ErrMalformed
			}
			if err := f(&it); err != nil {
				return err
			}
			continue
		}
		if it.Kind == Instance {
			it.Service = s.again(&service)
		}
		of := s.body()
		it.URL, it.Collection = of.url, of.collection
		if b := s.bytes(1); len(b) == 1 {
			it.Traits = b[0]
		}
		if b := s.bytes(8); len(b) == 8 {
			it.Hash = encode.Hash(binary.LittleEndian.Uint64(b))
		}
		it.SpecAt, it.NameAt, it.NameLen = s.number(1<<31), s.number(1<<31), s.number(1<<16-1)
		it.AddressAt, it.AddressLength = s.number(1<<31), s.number(1<<16-1)
		it.Buf = string(s.text())
		if !it.fits() {
			return ErrMalformed
		}
		if n := len(it.Buf); s.bad || it.SpecAt > n || it.NameLen == 0 || it.NameAt+it.NameLen > n ||
			it.AddressAt+it.AddressLength > n || it.AddressAt < it.SpecAt {
			return ErrMalformed
		}
		if err := f(&it); err != nil {
			return err
		}
	}
	if s.bad {
		return ErrMalformed
	}
	return nil
}
