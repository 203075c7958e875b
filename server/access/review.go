package access

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
)

const (
	// reviewTime bounds the wait for a turn and for the answer.
	reviewTime = 5 * time.Second
	// reviewsAtOnce bounds how many tokens are asked about at a time; of those
	// that come from one address, one.
	reviewsAtOnce = 8
	// accountTime is how long a token that is right is not asked about again,
	// strangerTime one that is not.
	accountTime, strangerTime = time.Minute, 10 * time.Second
	// maxReviewed bounds the tokens that are remembered, the right ones and the
	// others each.
	maxReviewed = 10_000
	// maxAnswer bounds an answer of the API server, maxMessage what is logged
	// of its reason, in bytes.
	maxAnswer, maxMessage = 1 << 20, 300
)

// Outcomes of a review, as the metric has them.
const (
	reviewAccount  = "account"  // of a service account
	reviewStranger = "stranger" // of nobody, for another audience, or a user's
	reviewFailed   = "failed"   // the API server could not be asked
)

// errReview is wrapped by errors of reviews that could not be made.
var errReview = errors.New("the API server of Kubernetes cannot be asked whose the token is")

// reviewer finds the service accounts of tokens by TokenReview of
// authentication.k8s.io/v1: one POST, whose answer is all that is needed of the
// API, and which no client library makes shorter. It is safe for concurrent
// use.
type reviewer struct {
	block  config.TokenReview
	server *watched[*apiServer]
	turns  *Turns

	mu sync.Mutex
	// guarded by mu
	accounts, strangers map[[sha256.Size]byte]verdict
}

type verdict struct {
	account string // "" of a stranger
	until   time.Time
}

// newReviewer reads what the API server is reached with. It does not ask it:
// the bridge starts without. An error is a *[conf.FieldError].
func newReviewer(block config.TokenReview) (*reviewer, error) {
	r := &reviewer{
		block: block, turns: NewTurns(reviewsAtOnce, 1, 0),
		accounts: make(map[[sha256.Size]byte]verdict), strangers: make(map[[sha256.Size]byte]verdict),
	}
	files, read, err := apiServerFiles(block.Kubeconfig)
	if err == nil {
		r.server, err = watch(files, read)
	}
	if err != nil {
		return nil, &conf.FieldError{Field: "token_review.kubeconfig", Reason: err.Error()}
	}
	return r, nil
}

// fault returns why the files in use are not those on disk.
func (r *reviewer) fault() error {
	err := r.server.fault()
	if s := r.server.get(); err == nil && s.tokenFile != nil {
		err = s.tokenFile.fault()
	}
	return err
}

func (r *reviewer) close() { r.server.get().client.CloseIdleConnections() }

// account returns the service account of a token as NAMESPACE/NAME, "" if it is
// none's. The outcome is "" if the token was asked about before. An error is
// [errReview].
func (r *reviewer) account(ctx context.Context, from netip.Addr, token string) (account, outcome string, err error) {
	if strings.Count(token, ".") != 2 {
		return "", "", nil // no JWT, and so none of a service account
	}
	key := sha256.Sum256([]byte(token))
	if v, ok := r.known(key); ok {
		return v.account, "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTime)
	defer cancel()
	turn, err := r.turns.Enter(ctx, Network(from).String())
	if err != nil {
		return "", reviewFailed, fmt.Errorf("%w: too many tokens are being asked about", errReview)
	}
	defer turn.Leave()
	if v, ok := r.known(key); ok { // asked about while this one waited
		return v.account, "", nil
	}
	server := r.server.get()
	user, err := server.review(ctx, token, r.block.Audience)
	if err != nil {
		return "", reviewFailed, fmt.Errorf("%w: %w", errReview, err)
	}
	outcome = reviewStranger
	if account = accountOf(user); account != "" {
		outcome = reviewAccount
	}
	r.remember(key, account)
	return account, outcome, nil
}

// accountOf returns NAMESPACE/NAME of a user name, "" if it is no service
// account's.
func accountOf(user string) string {
	name, ok := strings.CutPrefix(user, "system:serviceaccount:")
	namespace, name, found := strings.Cut(name, ":")
	if !ok || !found || namespace == "" || name == "" || strings.ContainsAny(namespace+name, ":/") {
		return ""
	}
	return namespace + "/" + name
}

func (r *reviewer) known(key [sha256.Size]byte) (verdict, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.accounts[key]
	if !ok {
		v, ok = r.strangers[key]
	}
	return v, ok && time.Now().Before(v.until)
}

// remember keeps what became of a token. Strangers do not displace accounts.
func (r *reviewer) remember(key [sha256.Size]byte, account string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.accounts, key)
	delete(r.strangers, key)
	of, lasts := r.accounts, accountTime
	if account == "" {
		of, lasts = r.strangers, strangerTime
	}
	if len(of) >= maxReviewed {
		clear(of)
	}
	of[key] = verdict{account, time.Now().Add(lasts)}
}

// tokenReview has the fields of TokenReview that are used.
type tokenReview struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec       struct {
		Token     string   `json:"token"`
		Audiences []string `json:"audiences"`
	} `json:"spec"`
	Status struct {
		Authenticated bool `json:"authenticated"`
		User          struct {
			Username string `json:"username"`
		} `json:"user"`
		Audiences []string `json:"audiences"`
	} `json:"status"`
	Message string `json:"message"` // of a Status in its place
}

// review returns the user of a token that was made for the audience, "" if
// there is none.
func (s *apiServer) review(ctx context.Context, token, audience string) (string, error) {
	ask := tokenReview{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"}
	ask.Spec.Token, ask.Spec.Audiences = token, []string{audience}
	body, err := json.Marshal(ask)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/apis/authentication.k8s.io/v1/tokenreviews", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.tokenFile != nil {
		req.Header.Set("Authorization", "Bearer "+s.tokenFile.get())
	} else if s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return "", err
	}
	return readReview(resp.StatusCode, text, token, audience)
}

// readReview returns the user of an answer of the API server.
func readReview(code int, text []byte, token, audience string) (string, error) {
	var answer tokenReview
	err := json.Unmarshal(text, &answer)
	switch {
	case code != http.StatusOK && code != http.StatusCreated:
		return "", fmt.Errorf("%d %s: %s", code, http.StatusText(code), clip.Text(strings.ReplaceAll(answer.Message, token, "<secret>"), maxMessage))
	case err != nil:
		return "", fmt.Errorf("the answer is not a TokenReview: %w", err)
	case answer.Kind != "TokenReview":
		return "", errors.New("the answer is not a TokenReview")
	case !answer.Status.Authenticated:
		return "", nil
	case !slices.Contains(answer.Status.Audiences, audience):
		// An API server that knows no audiences leaves them out.
		return "", nil
	}
	return answer.Status.User.Username, nil
}

// wantsReview reports whether a rule asks for a service account that the caller
// may have.
func (p *Policy) wantsReview(c *Caller) bool {
	if p.review == nil || c.Token == "" {
		return false
	}
	best := None
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case r.role() <= best || !r.fitsBut(c):
		case r.Peer.ServiceAccount == "":
			best = r.role()
		default:
			return true
		}
	}
	return false
}

// fitsAccount reports whether the service account of a caller is the rule's.
func (r *rule) fitsAccount(c *Caller) bool {
	ok, _ := path.Match(r.Peer.ServiceAccount, c.account) // validated
	return r.Peer.ServiceAccount == "" || ok && c.account != ""
}
