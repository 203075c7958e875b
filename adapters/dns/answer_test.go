package dns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// message is a reply to a question with records of three sections, each "+" and
// the answer's, "?" and the authority's or "*" and an additional one.
func message(t testing.TB, q question, rcode int, records ...string) []byte {
	t.Helper()
	m := new(dns.Msg).SetQuestion(q.name, q.record)
	m.Id, m.Response, m.Rcode = 7, true, rcode
	for _, text := range records {
		rr, err := dns.NewRR(text[1:])
		if err != nil {
			t.Fatal(err)
		}
		switch text[0] {
		case '+':
			m.Answer = append(m.Answer, rr)
		case '?':
			m.Ns = append(m.Ns, rr)
		default:
			m.Extra = append(m.Extra, rr)
		}
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	questionA   = question{"web.example.org.", dns.TypeA}
	questionSRV = question{"_a._tcp.example.org.", dns.TypeSRV}
)

const soa = "?example.org. 9 IN SOA ns hostmaster 1 1 1 1 5"

// TestRead shows what each kind of message says.
func TestRead(t *testing.T) {
	for _, c := range []struct {
		name    string
		q       question
		rcode   int
		records []string
		want    string
	}{
		{"records, sorted and once", questionA, 0, []string{"+web.example.org. 60 IN A 10.0.0.2", "+WEB.example.org. 30 IN A 10.0.0.1", "+web.example.org. 60 IN A 10.0.0.2"}, "found [10.0.0.1 10.0.0.2] [] 30s"},
		{"aliases, with the least TTL", questionA, 0, []string{"+b. 60 IN A 10.0.0.1", "+web.example.org. 50 IN CNAME a.", "+a. 20 IN CNAME b."}, "found [10.0.0.1] [] 20s"},
		{"records of another name", questionA, 0, []string{"+x.example.org. 60 IN A 10.0.0.1", soa}, "NODATA [] [] 5s"},
		{"an alias to elsewhere", questionA, 0, []string{"+web.example.org. 50 IN CNAME a.example.net.", "?example.net. 9 IN NS ns."}, "found [] [] 50s a.example.net."},
		{"an alias to nothing", questionA, 0, []string{"+web.example.org. 50 IN CNAME a.example.org.", soa}, "NODATA [] [] 5s"},
		{"an alias to no name", questionA, dns.RcodeNameError, []string{"+web.example.org. 50 IN CNAME a.example.org.", soa}, "NXDOMAIN [] [] 5s"},
		{"no name", questionA, dns.RcodeNameError, []string{soa}, "NXDOMAIN [] [] 5s"},
		{"no name, says nobody", questionA, dns.RcodeNameError, nil, "proves nothing"},
		{"no name, says a sibling", questionA, dns.RcodeNameError, []string{"?x.example.org. 9 IN SOA ns hostmaster 1 1 1 1 5"}, "proves nothing"},
		{"a circle", questionA, 0, []string{"+web.example.org. 50 IN CNAME web.example.org."}, "error circle"},
		{"an error", questionA, dns.RcodeRefused, nil, "error REFUSED"},
		{"an unspecified address", questionA, 0, []string{"+web.example.org. 60 IN A 0.0.0.0"}, "error filters"},
		{"one among others", questionA, 0, []string{"+web.example.org. 60 IN A 0.0.0.0", "+web.example.org. 60 IN A 10.0.0.1"}, "found [10.0.0.1] [] 1m0s"},
		{"a TTL with the highest bit", questionA, 0, []string{"+web.example.org. 2147483648 IN A 10.0.0.1"}, "found [10.0.0.1] [] 0s"},
		{
			"services with addresses", questionSRV, 0,
			[]string{"+_a._tcp.example.org. 60 IN SRV 2 1 80 b.", "+_a._tcp.example.org. 60 IN SRV 1 1 80 A.", "*a. 9 IN AAAA 2001:db8::1", "*a. 9 IN A 10.0.0.1", "*x. 1 IN A 10.0.0.2"},
			"found [] [{1 1 80 a.} {2 1 80 b.}] 9s map[a.:[10.0.0.1 2001:db8::1]]",
		},
		{"no such service", questionSRV, 0, []string{"+_a._tcp.example.org. 60 IN SRV 0 0 0 ."}, "NODATA [] [] 1m0s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, err := read(c.q, 7, message(t, c.q, c.rcode, c.records...))
			got := fmt.Sprintf("%v %v %v %v", a.kind, a.addrs, a.targets, a.ttl)
			if a.next != "" {
				got += " " + a.next
			}
			if a.extra != nil {
				got += fmt.Sprint(" ", a.extra)
			}
			if err != nil {
				got = "error " + err.Error()
			}
			for word := range strings.FieldsSeq(c.want) {
				if !strings.Contains(got, word) {
					t.Errorf("%s, want %s", got, c.want)
				}
			}
		})
	}
}

// TestForeign shows that a message is compared with the question, and what one
// without records is taken for.
func TestForeign(t *testing.T) {
	b := message(t, questionA, 0, "+web.example.org. 60 IN A 10.0.0.1")
	for _, c := range []struct {
		name string
		q    question
		id   uint16
		b    []byte
	}{
		{"another id", questionA, 8, b},
		{"another name", question{"x.example.org.", dns.TypeA}, 7, b},
		{"another type", question{"web.example.org.", dns.TypeAAAA}, 7, b},
		{"no header", questionA, 7, b[:11]},
	} {
		if _, err := read(c.q, c.id, c.b); !errors.Is(err, errForeign) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	b[2] |= 2
	for _, cut := range []int{len(b), len(b) - 3} {
		if _, err := read(questionA, 7, b[:cut]); !errors.Is(err, errTruncated) {
			t.Errorf("truncated at %d of %d: %v", cut, len(b), err)
		}
	}
}

// FuzzRead shows that no message makes the adapter panic, and that an answer
// has what its kind says.
func FuzzRead(f *testing.F) {
	f.Add(true, message(f, questionSRV, 0, "+_a._tcp.example.org. 60 IN SRV 2 1 80 b.", "*b. 9 IN A 10.0.0.1"))
	f.Add(false, message(f, questionA, 0, "+web.example.org. 50 IN CNAME a.", "+a. 20 IN A 10.0.0.1"))
	f.Add(false, message(f, questionA, dns.RcodeNameError, soa))
	f.Add(false, message(f, questionA, dns.RcodeServerFailure))
	f.Fuzz(func(t *testing.T, srv bool, packet []byte) {
		q := questionA
		if srv {
			q = questionSRV
		}
		a, err := read(q, 7, packet)
		records := len(a.addrs) + len(a.targets)
		if err != nil && records > 0 || err == nil && (records > 0) != (a.kind == found && a.next == "") || a.ttl < 0 {
			t.Errorf("%+v, %v", a, err)
		}
		for _, addr := range a.addrs {
			if !addr.Is4() {
				t.Errorf("A record with the address %v", addr)
			}
		}
		if srv && err == nil {
			_ = Name{}.srvInstances([]host{{target{}, []netip.Addr{{}}}}, true)
		}
	})
}

// TestGrace shows when an answer that there is nothing is believed: if all
// answers say so for long enough, in which the time of failures does not count,
// and at once of one type of address if there is the other.
func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = time.Minute
		one, none := &answer{addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}, &answer{kind: noName}
		v4, v6 := &query{question: questionA}, &query{question: question{questionA.name, dns.TypeAAAA}}
		step := func(q *query, a *answer, after time.Duration) {
			time.Sleep(after) //nolint:forbidigo // fake time
			if a == nil {
				q.fail(time.Now())
				return
			}
			q.take(a, time.Now(), grace)
		}
		want := func(what string, addrs int, settled, gone bool) {
			t.Helper()
			var p pair
			p.add(v4)
			p.add(v6)
			if len(p.addrs) != addrs || p.settled() != settled || p.gone() != gone {
				t.Errorf("%s: %v, settled %t, gone %t", what, p.addrs, p.settled(), p.gone())
			}
		}
		want("nothing was asked", 0, false, false)
		step(v4, one, 0)
		want("one type", 1, false, false)
		step(v6, nil, 0)
		want("an error", 1, false, false)
		step(v6, &answer{kind: noData}, 0)
		want("none of the other", 1, true, false)
		step(v4, none, time.Second)
		step(v6, none, 0)
		want("no name", 1, true, false)
		step(v4, none, grace-time.Second)
		step(v4, nil, 0)
		step(v4, none, time.Second)
		want("no name, and an error in between, which does not count", 1, true, false)
		step(v4, none, time.Second)
		want("no name for long enough", 0, false, false)
		step(v6, none, time.Second)
		want("of both types", 0, true, true)
		step(v4, nil, 0)
		want("an error afterwards", 0, true, true)
		step(v6, one, 0)
		want("back", 1, true, false)
	})
}

// TestPause shows how long an answer is used.
func TestPause(t *testing.T) {
	r := &run{Adapter: &Adapter{config: DefaultConfig}}
	least, most, grace := time.Duration(DefaultConfig.MinTTL), time.Duration(DefaultConfig.MaxTTL), time.Duration(DefaultConfig.RemoveGrace)
	now := time.Now()
	for _, c := range []struct {
		name      string
		ttl, want time.Duration
		since     time.Time
	}{
		{"its TTL", 100 * time.Second, 100 * time.Second, time.Time{}},
		{"no TTL", 0, least, time.Time{}},
		{"a long one", time.Hour, most, time.Time{}},
		{"that there is nothing, till the end of remove_grace", time.Hour, grace - 10*time.Second, now.Add(-10 * time.Second)},
	} {
		seen := map[time.Duration]bool{}
		for range 100 {
			got := r.pause(&query{since: c.since}, &answer{ttl: c.ttl}, now)
			if seen[got] = true; got < c.want || got > c.want*11/10 {
				t.Errorf("%s: used for %v, want %v to a tenth longer", c.name, got, c.want)
			}
		}
		if c.since.IsZero() && len(seen) < 10 {
			t.Errorf("%s: it is the same each time", c.name)
		}
	}
}

// TestSystemServers shows that the servers of the system are read again.
func TestSystemServers(t *testing.T) {
	c := newClient(DefaultConfig)
	c.system = filepath.Join(t.TempDir(), "resolv.conf")
	want := func(what, servers string) {
		t.Helper()
		err := c.readServers()
		if got := strings.Join(c.listed, " "); err != nil || got != servers {
			t.Errorf("%s: %s, %v, want %s", what, got, err, servers)
		}
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(c.system, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want("no file", "127.0.0.1:53")
	write("search example.org\nnameserver 192.0.2.1\nnameserver 2001:db8::1\n")
	want("two servers", "192.0.2.1:53 [2001:db8::1]:53")
	before := c.inUse()
	want("as before", "192.0.2.1:53 [2001:db8::1]:53")
	if c.inUse() != before {
		t.Error("the health of servers is forgotten although they are the same")
	}
	write("")
	want("no server", "127.0.0.1:53")
}
