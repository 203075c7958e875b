package dns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// question is a name and a type of record.
type question struct {
	name   string // canonical: lower case, with the final dot
	record uint16
}

// String returns "web.example.org AAAA".
func (q question) String() string {
	return strings.TrimSuffix(q.name, ".") + " " + dns.Type(q.record).String()
}

// kind is what an answer says.
type kind uint8

const (
	// found: there are records.
	found kind = iota
	// noData: the name exists, without such a record (NODATA).
	noData
	// noName: the name does not exist (NXDOMAIN).
	noName
	// unproven: no record, and no SOA of the zone that would say so.
	unproven
)

// String returns what the answer says in words.
func (k kind) String() string {
	switch k {
	case noData:
		return "there is no such record (NODATA)"
	case noName:
		return "there is no such name (NXDOMAIN)"
	case unproven:
		return "the answer has neither a record nor the SOA of a zone without it, which proves nothing"
	default:
		return "found"
	}
}

// answer is what servers say to a question.
type answer struct {
	kind    kind
	addrs   []netip.Addr // of A or AAAA, sorted
	targets []target     // of SRV, sorted
	// extra are the addresses of targets that came with them, by name.
	extra map[string][]netip.Addr
	odd   int // records that cannot be used
	ttl   time.Duration
	// next is the end of a chain of aliases, of which the server says no more.
	next string
}

// target is an SRV record.
type target struct {
	priority, weight, port uint16
	host                   string // canonical
}

// maxAliases bounds a chain of aliases (CNAME).
const maxAliases = 16

var (
	// errForeign: the message is no answer to the question.
	errForeign = errors.New("it answers another question")
	// errTruncated: the answer did not fit.
	errTruncated = errors.New("the answer is truncated")
)

// unusable is an error in what a server answers to one question. The server
// itself can be used.
type unusable struct {
	text  string
	rcode int
}

// Error implements error.
func (u *unusable) Error() string { return u.text }

func unusablef(format string, args ...any) error {
	return &unusable{text: fmt.Sprintf(format, args...)}
}

// read reads a message that may answer the question asked with id.
func read(q question, id uint16, packet []byte) (answer, error) {
	const headerLen, flagTC = 12, 0x02
	if len(packet) < headerLen || binary.BigEndian.Uint16(packet) != id {
		return answer{}, errForeign
	}
	var m dns.Msg
	if err := m.Unpack(packet); err != nil {
		if packet[2]&flagTC != 0 {
			return answer{}, errTruncated // some servers cut a record
		}
		return answer{}, unusablef("malformed answer: %.100v", err)
	}
	if !m.Response || m.Opcode != dns.OpcodeQuery {
		return answer{}, errForeign
	}
	refused := m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError
	asked := len(m.Question) == 1 && m.Question[0].Qtype == q.record && m.Question[0].Qclass == dns.ClassINET && strings.EqualFold(m.Question[0].Name, q.name)
	if !asked && (len(m.Question) > 0 || !refused) { // a refusal may lack the question
		return answer{}, errForeign
	}
	if refused {
		text, ok := dns.RcodeToString[m.Rcode]
		if !ok {
			text = fmt.Sprint("code ", m.Rcode)
		}
		return answer{}, &unusable{text: "answers " + text, rcode: m.Rcode}
	}
	if m.Truncated {
		return answer{}, errTruncated
	}
	return readRecords(q, &m)
}

// readRecords reads the sections of a message that is whole.
func readRecords(q question, m *dns.Msg) (answer, error) {
	owned := map[string][]dns.RR{} // records that may belong to the answer, by owner
	for _, rr := range m.Answer {
		h := rr.Header()
		if h.Class == dns.ClassINET && (h.Rrtype == q.record || h.Rrtype == dns.TypeCNAME) {
			name := dns.CanonicalName(h.Name)
			owned[name] = append(owned[name], rr)
		}
	}
	a := answer{ttl: time.Duration(math.MaxInt64)}
	at := q.name
	for hops := 0; ; hops++ {
		alias := ""
		records := 0
		for _, rr := range owned[at] {
			if c, ok := rr.(*dns.CNAME); ok {
				alias = dns.CanonicalName(c.Target)
				continue
			}
			records++
			if !a.add(rr) {
				a.odd++
			}
		}
		if records > 0 || alias == "" {
			a.expire(owned[at])
			break
		}
		a.expire(owned[at])
		if hops >= maxAliases {
			return answer{}, unusablef("more than %d aliases (CNAME), or a circle of them", maxAliases)
		}
		at = alias
	}
	if len(a.addrs) > 0 || len(a.targets) > 0 {
		slices.SortFunc(a.addrs, netip.Addr.Compare)
		a.addrs = slices.Compact(a.addrs)
		slices.SortFunc(a.targets, compareTargets)
		a.targets = slices.Compact(a.targets)
		a.addExtra(m.Extra)
		return a, nil
	}
	if a.odd > 0 && q.record != dns.TypeSRV {
		return answer{}, unusablef("no record has an address that could be used; filters answer so")
	}
	// RFC 2308, section 2: the SOA of the zone is in the authority section.
	proven := a.odd > 0 // the SRV target "." says that there is no such service
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok && dns.IsSubDomain(dns.CanonicalName(soa.Hdr.Name), at) {
			proven = true
			a.ttl = min(a.ttl, seconds(soa.Hdr.Ttl), seconds(soa.Minttl))
		}
	}
	switch {
	case !proven && at != q.name && m.Rcode == dns.RcodeSuccess:
		a.next = at
	case !proven:
		a.kind = unproven
	case m.Rcode == dns.RcodeNameError:
		a.kind = noName
	default:
		a.kind = noData
	}
	return a, nil
}

// add adds a record, and reports whether it can be used.
func (a *answer) add(rr dns.RR) bool {
	switch rr := rr.(type) {
	case *dns.A, *dns.AAAA:
		addr, ok := addressOf(rr)
		if ok {
			a.addrs = append(a.addrs, addr)
		}
		return ok
	case *dns.SRV:
		if rr.Target == "." || rr.Port == 0 {
			return false
		}
		a.targets = append(a.targets, target{rr.Priority, rr.Weight, rr.Port, dns.CanonicalName(rr.Target)})
		return true
	}
	return false
}

// addExtra adds the addresses of targets.
func (a *answer) addExtra(records []dns.RR) {
	for _, rr := range records {
		addr, ok := addressOf(rr)
		host := dns.CanonicalName(rr.Header().Name)
		if !ok || !slices.ContainsFunc(a.targets, func(t target) bool { return t.host == host }) {
			continue
		}
		if a.extra == nil {
			a.extra = map[string][]netip.Addr{}
		}
		a.extra[host] = append(a.extra[host], addr)
		a.ttl = min(a.ttl, seconds(rr.Header().Ttl))
	}
	for host, addrs := range a.extra {
		slices.SortFunc(addrs, netip.Addr.Compare)
		a.extra[host] = slices.Compact(addrs)
	}
}

// expire lowers the TTL to that of the records.
func (a *answer) expire(records []dns.RR) {
	for _, rr := range records {
		a.ttl = min(a.ttl, seconds(rr.Header().Ttl))
	}
}

// seconds returns a TTL. RFC 2181, section 8: one with the highest bit is 0.
func seconds(ttl uint32) time.Duration {
	if ttl > math.MaxInt32 {
		return 0
	}
	return time.Duration(ttl) * time.Second
}

// addressOf returns the address of an A or AAAA record.
func addressOf(rr dns.RR) (addr netip.Addr, ok bool) {
	switch rr := rr.(type) {
	case *dns.A:
		addr, ok = netip.AddrFromSlice(rr.A)
	case *dns.AAAA:
		addr, ok = netip.AddrFromSlice(rr.AAAA)
	}
	addr = addr.Unmap()
	return addr, ok && !addr.IsUnspecified() && !addr.IsMulticast()
}

func compareTargets(a, b target) int {
	for _, d := range []int{int(a.priority) - int(b.priority), strings.Compare(a.host, b.host), int(a.port) - int(b.port)} {
		if d != 0 {
			return d
		}
	}
	return int(a.weight) - int(b.weight)
}

// equal reports whether two answers say the same, whatever their TTL.
func (a *answer) equal(b *answer) bool {
	if a.kind != b.kind || a.odd != b.odd || !slices.Equal(a.addrs, b.addrs) || !slices.Equal(a.targets, b.targets) || len(a.extra) != len(b.extra) {
		return false
	}
	for host, addrs := range a.extra {
		if !slices.Equal(addrs, b.extra[host]) {
			return false
		}
	}
	return true
}
