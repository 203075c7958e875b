package plugin

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// packed is a list of instances in one string, a quarter of what the structs,
// slices and maps of it take. Lists that [EqualInstances] finds equal are equal
// strings, if their instances have the same order. The zero value is the empty
// list.
type packed string

// pack packs instances into a buffer, which it returns for the next call.
func pack(instances []registry.Instance, b []byte) (packed, []byte) {
	if len(instances) == 0 {
		return "", b
	}
	p := packer{b: binary.AppendUvarint(b[:0], uint64(len(instances)))}
	for i := range instances {
		p.instance(&instances[i])
	}
	return packed(p.b), p.b
}

// len returns the number of instances.
func (p packed) len() int { return (&unpacker{rest: string(p)}).count() }

// unpack returns the instances, which refer to the bytes of p.
func (p packed) unpack() []registry.Instance {
	u := unpacker{rest: string(p)}
	n := u.count()
	if n == 0 {
		return nil
	}
	out := make([]registry.Instance, n)
	for i := range out {
		u.instance(&out[i])
	}
	return out
}

type packer struct {
	b    []byte
	keys []string
}

// count writes a number; a negative one has ten bytes.
func (p *packer) count(n int) { p.b = binary.AppendUvarint(p.b, uint64(n)) } //nolint:gosec // back by count of unpacker

func (p *packer) text(s string) {
	p.count(len(s))
	p.b = append(p.b, s...)
}

func (p *packer) flag(is bool) {
	if is {
		p.b = append(p.b, 1)
		return
	}
	p.b = append(p.b, 0)
}

func (p *packer) instance(i *registry.Instance) {
	for _, s := range [...]string{i.ID, i.Address, i.Check, i.Cluster, i.ServiceAccount, i.Node, i.Locality.Region, i.Locality.Zone, i.Locality.SubZone} {
		p.text(s)
	}
	p.b = append(p.b, byte(i.Health))
	p.flag(i.Disabled)
	p.flag(i.Weight != nil)
	if i.Weight != nil {
		p.b = binary.BigEndian.AppendUint64(p.b, math.Float64bits(*i.Weight))
	}
	p.count(len(i.Ports))
	for _, port := range i.Ports {
		p.text(port.Name)
		p.count(port.Number)
		p.text(port.Protocol)
	}
	p.count(len(i.Tags))
	for _, tag := range i.Tags {
		p.text(tag)
	}
	p.keys = p.keys[:0]
	for key := range i.Meta {
		p.keys = append(p.keys, key)
	}
	slices.Sort(p.keys)
	p.count(len(p.keys))
	for _, key := range p.keys {
		p.text(key)
		p.text(i.Meta[key])
	}
}

// unpacker reads what packer wrote.
type unpacker struct{ rest string }

func (u *unpacker) byte() byte {
	b := u.rest[0]
	u.rest = u.rest[1:]
	return b
}

// count reads a number, 0 at the end.
func (u *unpacker) count() (n int) {
	for shift := 0; u.rest != ""; shift += 7 {
		b := u.byte()
		n |= int(b&0x7f) << shift
		if b < 0x80 {
			break
		}
	}
	return n
}

func (u *unpacker) text() string {
	n := u.count()
	s := u.rest[:n]
	u.rest = u.rest[n:]
	return s
}

func (u *unpacker) instance(i *registry.Instance) {
	for _, s := range [...]*string{&i.ID, &i.Address, &i.Check, &i.Cluster, &i.ServiceAccount, &i.Node, &i.Locality.Region, &i.Locality.Zone, &i.Locality.SubZone} {
		*s = u.text()
	}
	i.Health = registry.Health(u.byte())
	i.Disabled = u.byte() == 1
	if u.byte() == 1 {
		i.Weight = new(math.Float64frombits(binary.BigEndian.Uint64([]byte(u.rest[:8]))))
		u.rest = u.rest[8:]
	}
	if n := u.count(); n > 0 {
		i.Ports = make([]registry.Port, n)
	}
	for k := range i.Ports {
		i.Ports[k].Name = u.text()
		i.Ports[k].Number = u.count()
		i.Ports[k].Protocol = u.text()
	}
	if n := u.count(); n > 0 {
		i.Tags = make([]string, n)
	}
	for k := range i.Tags {
		i.Tags[k] = u.text()
	}
	n := u.count()
	if n > 0 {
		i.Meta = make(map[string]string, n)
	}
	for range n {
		key := u.text()
		i.Meta[key] = u.text()
	}
}
