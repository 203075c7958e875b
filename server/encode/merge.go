package encode

import (
	"cmp"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"
)

// Entry is what of a ServiceEntry matters to others with the same host.
type Entry struct {
	Hosts      []string
	ExportTo   []string
	Ports      []ServicePort
	Resolution string
	Location   string
}

// ServicePort is a port of a ServiceEntry.
type ServicePort struct {
	Name     string
	Protocol string
	Number   uint32
	Target   uint32 // of endpoints that state none
}

// ParseEntry decodes a ServiceEntry that [Parse] accepted.
func ParseEntry(serviceEntry []byte) (Entry, error) {
	var se networking.ServiceEntry
	if err := proto.Unmarshal(serviceEntry, &se); err != nil {
		return Entry{}, err
	}
	e := Entry{Hosts: se.GetHosts(), ExportTo: se.GetExportTo(), Resolution: se.GetResolution().String(), Location: se.GetLocation().String()}
	for _, p := range se.GetPorts() {
		e.Ports = append(e.Ports, ServicePort{p.GetName(), p.GetProtocol(), p.GetNumber(), cmp.Or(p.GetTargetPort(), p.GetNumber())})
	}
	return e, nil
}

// Field numbers of WorkloadEntry that only [Rewrite] needs.
const workloadEntryWeight = 6

// NamedPort is an entry of the ports of a WorkloadEntry.
type NamedPort struct {
	Name   string
	Number uint32
}

// Rewriting is what an encoded WorkloadEntry has in place of its own.
type Rewriting struct {
	Selector string      // the value of [SelectorLabel]
	Ports    []NamedPort // nil: its own
	Weight   uint32      // 0: its own
}

// Rewrite returns a copy of an encoded WorkloadEntry with what w says.
func Rewrite(workloadEntry []byte, w Rewriting) []byte {
	out := make([]byte, 0, len(workloadEntry)+len(SelectorLabel)+len(w.Selector)+16)
	_ = fields(workloadEntry, func(num protowire.Number, _ protowire.Type, field, value []byte) error {
		switch {
		case num == workloadEntryPorts && w.Ports != nil:
		case num == workloadEntryWeight && w.Weight != 0:
		case num == workloadEntryLabels && mapEntryHas(value, SelectorLabel):
		default:
			out = append(out, field...)
		}
		return nil
	})
	for _, p := range w.Ports {
		size := sizeString(p.Name) + 1 + protowire.SizeVarint(uint64(p.Number))
		out = protowire.AppendTag(out, workloadEntryPorts, protowire.BytesType)
		out = protowire.AppendVarint(out, uint64(size))
		out = appendString(out, mapKey, p.Name)
		out = protowire.AppendTag(out, mapValue, protowire.VarintType)
		out = protowire.AppendVarint(out, uint64(p.Number))
	}
	if w.Weight != 0 {
		out = protowire.AppendTag(out, workloadEntryWeight, protowire.VarintType)
		out = protowire.AppendVarint(out, uint64(w.Weight))
	}
	return AppendLabel(out, SelectorLabel, w.Selector)
}

// mapEntryHas reports whether an entry of a map of strings has a key.
func mapEntryHas(entry []byte, key string) (has bool) {
	_ = fields(entry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == mapKey {
			has = string(value) == key
		}
		return nil
	})
	return has
}

// Weight returns the weight of an encoded WorkloadEntry, 1 if it has none.
func Weight(workloadEntry []byte) uint32 {
	weight := uint64(0)
	_ = fields(workloadEntry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == workloadEntryWeight {
			weight, _ = protowire.ConsumeVarint(value)
		}
		return nil
	})
	return max(uint32(weight), 1)
}

// PortOf returns the number of a named port of an encoded WorkloadEntry, 0 if
// it has none.
func PortOf(workloadEntry []byte, name string) (number uint32) {
	eachPort(workloadEntry, func(key []byte, n uint64) {
		if string(key) == name {
			number = uint32(n)
		}
	})
	return number
}

// WithName returns a copy of encoded metadata with another name.
func WithName(metadata []byte, name string) []byte {
	out := appendString(make([]byte, 0, len(metadata)+len(name)), metadataName, name)
	_ = fields(metadata, func(num protowire.Number, _ protowire.Type, field, _ []byte) error {
		if num != metadataName {
			out = append(out, field...)
		}
		return nil
	})
	return slices.Clip(out)
}
