package eureka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// maxBody bounds one answer, in bytes. Answers are decoded as a stream:
	// 100,000 instances are about 120 MB.
	maxBody = 1 << 30
	// remembered is how long every server retains a change: three minutes by
	// default (retentionTimeInMSInDeltaQueue), less the half minute for which
	// it caches answers. After a longer pause the whole registry is requested.
	remembered = 2 * time.Minute
)

// Adapter follows one Eureka registry. New makes one.
type Adapter struct {
	config  Config
	env     plugin.Env
	client  *plugin.HTTPClient
	convert converter
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	a, err := newAdapter(c, env)
	if err != nil {
		return nil, err
	}
	return a, nil
}

func newAdapter(c Config, env plugin.Env) (*Adapter, error) {
	c.ServiceBy = cmp.Or(c.ServiceBy, DefaultConfig.ServiceBy)
	c.Address = cmp.Or(c.Address, DefaultConfig.Address)
	c.Interval = cmp.Or(c.Interval, DefaultConfig.Interval)
	c.FullInterval = cmp.Or(c.FullInterval, DefaultConfig.FullInterval)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	client, err := c.HTTP.NewClient(maxBody)
	if err != nil {
		return nil, err
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{config: c, env: env, client: client, convert: converter{c}}, nil
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// Eureka ends it; requests are retried.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	defer a.client.Close()
	servers := make([]string, len(a.config.Servers))
	for i, s := range a.config.Servers {
		servers[i] = baseURL(s)
	}
	f := &follower{Adapter: a, catalog: catalog, servers: plugin.NewServers(servers)}
	p := plugin.Poll{
		Fetch: f.fetch, Interval: time.Duration(a.config.Interval), Timeout: 10 * time.Minute, // each request has its own
		RemoveGrace: time.Duration(a.config.RemoveGrace), MinShare: a.config.MinShare, AcceptEmpty: a.config.AcceptEmpty, AcceptEmptyField: "accept_empty",
		Detail: func() string {
			if s := f.servers.String(); s != "" {
				return "polling " + s
			}
			return "polling"
		},
	}
	return p.Run(ctx, catalog)
}

// follower is the state of one Run.
type follower struct {
	*Adapter
	catalog plugin.Catalog
	servers *plugin.Servers

	state  *state // nil if the next request must be for the whole registry
	server string // whose state it is; "" before the first answer
	// whole is the time of the last full answer, last that of the last answer.
	whole, last time.Time
	// noDeltaUntil is when a server that does not serve changes is asked for
	// them again.
	noDeltaUntil time.Time
}

// fetch requests the changes, or the whole registry. It implements
// plugin.Poll.Fetch.
func (f *follower) fetch(ctx context.Context) (l plugin.Listing, err error) {
	err = f.servers.Do(ctx, func(ctx context.Context, server string) error {
		l, err = f.ask(ctx, server)
		return err
	})
	return l, err
}

// ask queries one server.
func (f *follower) ask(ctx context.Context, server string) (plugin.Listing, error) {
	begin := time.Now()
	if f.state != nil && server == f.server && begin.Sub(f.last) < remembered && begin.Sub(f.whole) < time.Duration(f.config.FullInterval) && begin.After(f.noDeltaUntil) {
		var changes []application
		hash, err := f.get(ctx, server+"/apps/delta", func(a *application) { changes = append(changes, *a) })
		status, refused := errors.AsType[*plugin.StatusError](err)
		switch {
		case refused && (status.Status == http.StatusForbidden || status.Status == http.StatusNotFound || status.Status == http.StatusNotImplemented):
			// Servers may have /apps/delta disabled. If nothing else works
			// either, the next request fails too.
			f.env.Log.Info("the server does not report changes; everything is read each time", slog.String("server", server))
			f.noDeltaUntil = begin.Add(time.Duration(f.config.FullInterval))
		case err != nil:
			return plugin.Listing{}, err
		default:
			if l := f.state.apply(changes); f.state.hash() == hash {
				f.last = begin
				f.state.leftOut.Tell(f.catalog, "services", "")
				return l, nil
			}
			f.env.Log.Debug("what is known does not come to the server's hash code; everything is asked for", slog.String("server", server))
		}
	}

	f.state = nil // until an answer succeeds, request the whole registry
	next := newState(f.convert)
	hash, err := f.get(ctx, server+"/apps", next.add)
	if err != nil {
		return plugin.Listing{}, err
	}
	l := next.listing()
	next.leftOut.Tell(f.catalog, "services", "")
	if f.server != "" && f.server != server {
		l.Lost = fmt.Errorf("%s answers in place of %s", server, f.server)
		f.noDeltaUntil = time.Time{}
	}
	f.server, f.last, f.whole = server, begin, begin
	if got := next.hash(); got != hash && hash != "" {
		l.Doubt = fmt.Errorf("%s lists instances that come to the hash code %q, and says %q: the list is not whole, and nothing is removed", server, got, hash)
		return l, nil
	}
	if len(next.records) > 0 {
		f.state = next
	} // otherwise Poll may reject it, and needs a whole list next
	return l, nil
}

// get requests applications, passes them to take one by one, and returns the
// hash code of the answer.
func (f *follower) get(ctx context.Context, url string, take func(*application)) (hash string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Accept", "application/json")
	err = f.client.Do(req, func(res *http.Response) error {
		hash, err = readApplications(res.Body, take)
		return err
	})
	return hash, err
}
