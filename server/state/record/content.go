package record

import (
	"strings"
	"unsafe"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

// Content is what a resource says. It is immutable, except for what belongs to
// its holder.
type Content struct {
	buf  string      // metadata fields except the version, then the spec
	hash encode.Hash // of the content, including an instance's label

	nameAt    uint32 // offset of the name in buf
	specAt    uint32 // offset of the spec in buf
	addressAt uint32 // offset of a WorkloadEntry's address in buf

	// Seen and Marks are the holder's. They are here since there is room.
	Seen uint32

	nameLen    uint16
	addressLen uint16
	traits     Traits
	Marks      uint8
}

// Traits are immutable properties of a resource.
type Traits uint8

// The traits.
const (
	Static     Traits = 1 << iota // a ServiceEntry whose endpoints are IP addresses
	Composable                    // a ServiceEntry with neither endpoints nor workloadSelector
	OwnAddress                    // a ServiceEntry with addresses, or that must not have any
	OwnLabel                      // an instance received with the label of its service
	Tombstone                     // a removed name, without content
	Derived                       // an instance as served in another service
)

// savedTraits are the traits that are saved, and of a copy.
const savedTraits = Static | Composable | OwnAddress | OwnLabel

// Of returns a copy of a part.
func Of(p *encode.Part) Content {
	var b strings.Builder
	b.Grow(len(p.Metadata) + len(p.Spec))
	b.Write(p.Metadata)
	b.Write(p.Spec)
	c := Content{
		buf: b.String(), hash: p.Hash,
		specAt: uint32(len(p.Metadata)), nameLen: uint16(len(p.Name)), addressLen: uint16(min(len(p.Address), 1<<16-1)),
	}
	// The name and the address may occur several times; any occurrence will do.
	c.nameAt = uint32(strings.Index(c.buf, p.Name))
	c.addressAt = c.specAt + uint32(max(strings.Index(c.buf[c.specAt:], p.Address), 0))
	c.Set(Static, p.Static)
	c.Set(Composable, p.Composable)
	c.Set(OwnAddress, p.OwnAddress)
	return c
}

// TombstoneOf returns the tombstone of a removed name.
func TombstoneOf(name string) Content {
	return Content{buf: strings.Clone(name), nameLen: uint16(len(name)), specAt: uint32(len(name)), traits: Tombstone}
}

// Copy returns the same content, without marks.
func (c *Content) Copy() Content {
	out := *c
	out.traits &= savedTraits
	out.Marks = 0
	return out
}

// Saved returns the content of a saved item.
func Saved(s *saved.Item) Content {
	return Content{
		buf: s.Buf, hash: s.Hash, traits: Traits(s.Traits) & savedTraits, specAt: uint32(s.SpecAt), nameAt: uint32(s.NameAt),
		nameLen: uint16(s.NameLen), addressAt: uint32(s.AddressAt), addressLen: uint16(s.AddressLength),
	}
}

// Save sets the content of an item.
func (c *Content) Save(it *saved.Item) {
	it.Buf, it.Hash, it.Traits, it.SpecAt, it.NameAt = c.buf, c.hash, byte(c.traits&savedTraits), int(c.specAt), int(c.nameAt)
	it.NameLen, it.AddressAt, it.AddressLength = int(c.nameLen), int(c.addressAt), int(c.addressLen)
}

// Is reports whether the resource has one of some traits.
func (c *Content) Is(t Traits) bool { return c.traits&t != 0 }

// Set adds traits to a content that nobody else has yet.
func (c *Content) Set(t Traits, on bool) {
	if on {
		c.traits |= t
	}
}

// Encoded returns the content itself; see [Endpoint].
func (c *Content) Encoded() *Content { return c }

// Name returns the resource's name, "namespace/name".
func (c *Content) Name() string { return c.buf[c.nameAt:][:c.nameLen] }

// Namespace returns the part of the name before the slash.
func (c *Content) Namespace() string {
	ns, _, _ := strings.Cut(c.Name(), "/")
	return ns
}

// Sum returns the hash of the content.
func (c *Content) Sum() encode.Hash { return c.hash }

// Address returns the address of a WorkloadEntry.
func (c *Content) Address() string { return c.buf[c.addressAt:][:c.addressLen] }

// Metadata returns the encoded metadata, which must not be modified.
func (c *Content) Metadata() []byte { return readOnly(c.buf[:c.specAt]) }

// Spec returns the encoded body, which must not be modified.
func (c *Content) Spec() []byte { return readOnly(c.buf[c.specAt:]) }

// Size returns the length of metadata and body, in bytes.
func (c *Content) Size() int { return len(c.buf) }

// readOnly returns the bytes of s without copying. They must not be modified.
func readOnly(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }
