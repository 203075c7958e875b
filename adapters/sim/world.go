package sim

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// change is a kind of change, in the order of [Changes.weights].
type change int

const (
	instanceAdded change = iota
	instanceRemoved
	healthFlipped
	weightChanged
	portChanged
	labelChanged
	serviceAdded
	serviceRemoved
)

// words are the first parts of services' names. Additions rename services, so
// the list is fixed.
var words = [...]string{
	"account", "address", "analytics", "audit", "auth", "basket", "billing", "catalog",
	"checkout", "consent", "coupon", "currency", "delivery", "discount", "email", "feature",
	"forecast", "fraud", "gateway", "identity", "image", "inventory", "invoice", "ledger",
	"loyalty", "media", "message", "notify", "offer", "order", "partner", "payment",
	"pricing", "profile", "quota", "rating", "recommend", "refund", "report", "review",
	"reward", "schedule", "search", "session", "shipping", "stock", "tax", "wishlist",
}

// protocols are the services' protocols, in the order of [Protocols.weights].
var protocols = [...]struct {
	name   string
	number int
}{{"http", 8080}, {"grpc", 9090}, {"tcp", 7000}}

const versions = 5 // v1 to v5

// world is the generated registry. It draws from one stream of random numbers,
// so it is a pure function of the configuration and the number of steps. It is
// not safe for concurrent use.
type world struct {
	conf       Config
	rand       *rand.Rand
	addresses  addresses
	localities []registry.Locality
	meta       [versions]map[string]string // by version; shared by instances, immutable
	changes    []float64
	protocols  []float64

	services []*service
	nextName int // number of the next new service; numbers are not reused

	stamped int64 // last time given to a change, in nanoseconds since 1970
}

// service is one generated service.
type service struct {
	registry.Service
	instances []registry.Instance
	nextID    int // number of the next new instance; numbers are not reused
	failing   int // number of failing instances
}

// newWorld builds the initial state. c must be valid.
func newWorld(c Config) *world {
	prefix, _ := c.network() // checked by Validate
	w := &world{
		conf:       c,
		rand:       rand.New(rand.NewPCG(c.Seed, 0x697374686d757321)),
		addresses:  newAddresses(prefix),
		localities: c.localities(),
		changes:    c.Changes.weights(),
		protocols:  c.Protocols.weights(),
	}
	for i := range w.meta {
		w.meta[i] = maps.Clone(c.Meta)
		if w.meta[i] == nil {
			w.meta[i] = make(map[string]string, 1)
		}
		w.meta[i]["version"] = fmt.Sprintf("v%d", i+1)
	}
	for range c.Services {
		w.addService()
	}
	return w
}

// step makes one change and returns the changed service; gone reports that it
// was removed. Every step is a change, except in a registry without services,
// which never changes and returns nil.
func (w *world) step() (svc *service, gone bool) {
	if len(w.services) == 0 {
		return nil, false
	}
	kind := change(w.draw(w.changes))
	if kind == serviceAdded || kind == serviceRemoved {
		fewest, most := w.conf.serviceBounds()
		if n := len(w.services); n <= fewest {
			kind = serviceAdded
		} else if n >= most {
			kind = serviceRemoved
		}
		if kind == serviceAdded {
			return w.addService(), false
		}
		return w.removeService(), true
	}

	svc = w.services[w.rand.IntN(len(w.services))]
	fewest, most := w.conf.instanceBounds()
	switch n := len(svc.instances); {
	case n == 0:
		kind = instanceAdded // no other change is possible
	case kind == instanceAdded && n >= most:
		kind = instanceRemoved
	case kind == instanceRemoved && n <= fewest:
		kind = instanceAdded
	}
	var changed *registry.Instance
	switch kind {
	case instanceAdded:
		w.addInstance(svc)
		changed = &svc.instances[len(svc.instances)-1]
	case instanceRemoved:
		w.removeInstance(svc)
	case healthFlipped:
		changed = w.flipHealth(svc)
	case weightChanged:
		i := w.instance(svc)
		changed = i
		i.Weight = new(float64(other(w.rand, 1, 10, int(*i.Weight))))
	case portChanged:
		i := w.instance(svc)
		changed = i
		p := i.Ports[0]
		p.Number = other(w.rand, 20000, 29999, p.Number)
		i.Ports = []registry.Port{p}
	case labelChanged:
		i := w.instance(svc)
		changed = i
		var now int
		_, _ = fmt.Sscanf(i.Meta["version"], "v%d", &now)
		i.Meta = w.meta[other(w.rand, 1, versions, now)-1]
	default:
		panic(fmt.Sprintf("BUG: change %d of an instance", kind))
	}
	if w.conf.Stamp && changed != nil {
		w.stamp(changed)
	}
	return svc, false
}

// ChangedAt is the metadata key of [Config.Stamp].
const ChangedAt = "changed-at"

// stamp gives an instance the time of its change. No two changes have the same.
func (w *world) stamp(i *registry.Instance) {
	w.stamped = max(w.stamped+1, time.Now().UnixNano())
	i.Meta = maps.Clone(i.Meta)
	i.Meta[ChangedAt] = strconv.FormatInt(w.stamped, 10)
}

func (w *world) addService() *service {
	p := protocols[w.draw(w.protocols)]
	name, instances := fmt.Sprintf("%s-%04d", words[w.nextName%len(words)], w.nextName), w.conf.instancesOf(w.nextName)
	if w.conf.prefix != "" {
		name = fmt.Sprintf("%s.%d", w.conf.prefix, w.nextName)
	}
	svc := &service{Service: registry.Service{
		Key:   registry.Key{Name: name},
		Ports: []registry.Port{{Name: p.name, Number: p.number, Protocol: p.name}},
	}}
	w.nextName++
	svc.instances = make([]registry.Instance, 0, instances)
	for range instances {
		w.addInstance(svc)
	}
	w.services = append(w.services, svc)
	return svc
}

func (w *world) removeService() *service {
	n := w.rand.IntN(len(w.services))
	svc := w.services[n]
	last := len(w.services) - 1
	w.services[n], w.services[last] = w.services[last], nil
	w.services = w.services[:last]
	for _, i := range svc.instances {
		w.addresses.free(i.Address)
	}
	return svc
}

func (w *world) addInstance(svc *service) {
	svc.nextID++
	svc.instances = append(svc.instances, registry.Instance{
		ID:       fmt.Sprintf("%s-%d", svc.Key.Name, svc.nextID),
		Address:  w.addresses.take(),
		Ports:    svc.Ports,
		Meta:     w.meta[w.rand.IntN(2)],
		Weight:   new(1.0),
		Health:   registry.HealthPassing,
		Locality: w.localities[w.rand.IntN(len(w.localities))],
	})
}

func (w *world) removeInstance(svc *service) {
	n := w.rand.IntN(len(svc.instances))
	gone := svc.instances[n]
	w.addresses.free(gone.Address)
	if gone.Health != registry.HealthPassing {
		svc.failing--
	}
	svc.instances = slices.Delete(svc.instances, n, n+1)
}

// flipHealth makes a failing instance pass or a passing one fail. At most a
// fifth of a service's instances fail at a time, but at least one may. It
// returns the instance.
func (w *world) flipHealth(svc *service) *registry.Instance {
	heal := svc.failing > 0 && (svc.failing >= max(1, len(svc.instances)/5) || w.rand.IntN(2) == 0)
	candidates := len(svc.instances) - svc.failing
	if heal {
		candidates = svc.failing
	}
	n := w.rand.IntN(candidates)
	for i := range svc.instances {
		inst := &svc.instances[i]
		if (inst.Health != registry.HealthPassing) != heal {
			continue
		}
		if n--; n >= 0 {
			continue
		}
		switch {
		case heal:
			inst.Health = registry.HealthPassing
			svc.failing--
		case w.rand.IntN(4) == 0:
			inst.Health = registry.HealthWarning
			svc.failing++
		default:
			inst.Health = registry.HealthCritical
			svc.failing++
		}
		return inst
	}
	panic("BUG: no instance to flip the health of")
}

// instance draws an instance of svc, which must have some.
func (w *world) instance(svc *service) *registry.Instance {
	return &svc.instances[w.rand.IntN(len(svc.instances))]
}

// draw returns an index of weights with a probability proportional to its
// weight.
func (w *world) draw(weights []float64) int {
	sum := 0.0
	for _, x := range weights {
		sum += x
	}
	at, last := w.rand.Float64()*sum, 0
	for i, x := range weights {
		if x == 0 {
			continue
		}
		if at < x {
			return i
		}
		at, last = at-x, i
	}
	return last // rounding moved at to the end
}

// other draws a number from lo to hi other than now. lo must be less than hi.
func other(r *rand.Rand, lo, hi, now int) int {
	if now < lo || now > hi {
		return lo + r.IntN(hi-lo+1)
	}
	n := lo + r.IntN(hi-lo)
	if n >= now {
		n++
	}
	return n
}

// addresses allocates the addresses of a network.
type addresses struct {
	base netip.Addr
	next uint64 // offset of the lowest address that was never allocated
	end  uint64 // offset after the last one
	// freed holds the released addresses, oldest first, from index head on. One
	// is reused only after others were released, or when no unused one is left.
	// So addresses do not return at once, as in a real network, and the list
	// stays short.
	freed []string
	head  int
}

const resting = 1024

// newAddresses omits the network address and, for IPv4, the broadcast address.
func newAddresses(p netip.Prefix) addresses {
	a := addresses{base: p.Addr(), end: addressCount(p)}
	if bits := p.Addr().BitLen() - p.Bits(); bits > 1 {
		a.next, a.end = 1, a.end+1
	}
	return a
}

// addressCount returns the number of addresses of newAddresses(p), at most
// 2^62.
func addressCount(p netip.Prefix) uint64 {
	bits := p.Addr().BitLen() - p.Bits()
	if bits > 62 {
		return 1 << 62
	}
	n := uint64(1) << bits
	if bits > 1 {
		n -= 2
	}
	return n
}

func (a *addresses) take() string {
	if waiting := len(a.freed) - a.head; waiting > resting || a.next == a.end {
		if waiting == 0 {
			panic("BUG: the network has no address left")
		}
		s := a.freed[a.head]
		a.head++
		if a.head > len(a.freed)/2 {
			a.freed, a.head = slices.Delete(a.freed, 0, a.head), 0
		}
		return s
	}
	addr := a.base.As16()
	for i, carry := 15, a.next; carry > 0; i-- {
		carry += uint64(addr[i])
		addr[i], carry = byte(carry), carry>>8
	}
	a.next++
	return netip.AddrFrom16(addr).Unmap().String()
}

func (a *addresses) free(address string) { a.freed = append(a.freed, address) }
