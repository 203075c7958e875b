package state

import (
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

// Saved is a parsed run of saved items.
type Saved struct{ items []item }

// saved returns the record as it is saved; the number identifies its registry.
func (r *Record) saved(registry int, more bool) saved.Item {
	it := saved.Item{Registry: registry, More: more, Kind: saved.Plain, URL: r.kind.url}
	r.Save(&it)
	switch {
	case r.parts != nil:
		it.Kind = saved.Entry
	case r.of != nil:
		it.Kind, it.Service = saved.Instance, r.of.name
	}
	return it
}

// ParseSaved parses and copies a run of saved items. It is safe for concurrent
// use. Bytes not in this format are an error.
func (d *DB) ParseSaved(run []byte) (out Saved, err error) {
	kinds := make(map[kind]*kind)
	err = saved.Parse(run, func(s *saved.Item) error {
		of := kind{collection: d.tables[s.Collection], url: s.URL}
		if of.collection == nil {
			return saved.ErrMalformed
		}
		k := kinds[of]
		if k == nil {
			k = &of
			kinds[of] = k
		}
		r := &Record{kind: k}
		switch s.Kind {
		case saved.Removal:
			r = newTombstone(k, s.Name)
		case saved.Entry:
			r.parts = &composition{}
			fallthrough
		default:
			r.Content = record.Saved(s)
		}
		out.items = append(out.items, item{r, s.Registry, s.More, s.Service})
		return nil
	})
	return out, err
}

// Restore serves saved items until the registries are listed. Later items
// replace earlier ones of the same name, and conflicts are decided anew. Each
// registry in registries counts as having completed its first listing; its
// first own listing removes what it does not mention. The DB must be unused.
//
// A panic is a [*saved.DefectError], which leaves the DB unused; the items are
// spent.
func (d *DB) Restore(items []Saved, registries []saved.Registry) (out []saved.Restored, err error) {
	d.apply.Lock()
	defer d.unlock()
	for _, r := range d.registries {
		if r.listing > 0 || r.status.Synced || r.resources > 0 {
			return nil, saved.ErrNotEmpty
		}
	}
	l := loader{d: d, items: items}
	for _, s := range registries {
		l.registries = append(l.registries, d.Registry(s.Name))
	}
	if err := l.restore(); err != nil {
		d.replace(d.reset)
		return nil, err
	}
	for n, r := range l.registries {
		if r == nil {
			continue
		}
		r.status.Restored, r.status.Revision = registries[n].AsOf, d.revision
		r.status.Services, r.status.Instances = uint64(r.services), uint64(r.instances)
		d.restored.Add(1)
		out = append(out, saved.Restored{
			Registry: r.name, Services: r.services, Instances: r.instances, Published: r.resources - r.services - r.instances, LeftOut: l.leftOut[n],
		})
	}
	d.remark()
	d.wake()
	return out, nil
}

// restore loads what was saved. A panic is a [*saved.DefectError].
func (l *loader) restore() (err error) {
	defer func() {
		if p := recover(); p != nil {
			of := &saved.DefectError{}
			if l.at != nil && l.registries[l.at.registry] != nil {
				of.Registry = l.registries[l.at.registry].name
			}
			of.Err = l.d.defect(p, aRestore, of.Registry)
			err = of
		}
	}()
	l.d.replace(func() { err = l.load() })
	return err
}
