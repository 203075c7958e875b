package consul

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
)

// hosts are the addresses of a registry, which differ in host and port alone.
// One of them is used until it fails.
type hosts struct {
	all []string // host:port
	// changed is called, if it is not nil, once another one has answered: with
	// that, and why the one before is not used.
	changed func(host string, err error)

	mu   sync.Mutex // guards everything below
	now  int
	last string // that has answered
	err  error  // of the last one that failed
}

// current returns the one that is used.
func (h *hosts) current() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.all[h.now]
}

// answered records that one has answered.
func (h *hosts) answered(host string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last == host || host != h.all[h.now] {
		return
	}
	if h.last, host = host, h.last; (host != "" || h.err != nil) && h.changed != nil {
		h.changed(h.last, h.err)
	}
}

// fail records that one has failed. If that is the one that is used, the next
// one is.
func (h *hosts) fail(host string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.all) > 1 && h.all[h.now] == host {
		h.now, h.err = (h.now+1)%len(h.all), fmt.Errorf("%s: %w", host, err)
	}
}

// notReached reports whether an error means that no connection came about.
func notReached(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || isTLS(err)
}

// tellHosts makes the detail say which one is used. It precedes all queries.
func (a *Adapter) tellHosts(st *state) {
	a.clients.hosts.changed = func(host string, err error) {
		a.env.Log.Info("another address is used", slog.String("address", host), slog.Any("err", err))
		st.detail(detailAddress)(fmt.Sprintf("at %s, since another address failed: %v", host, err))
	}
}
