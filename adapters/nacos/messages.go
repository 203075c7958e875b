package nacos

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_request"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_response"
	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Error codes in the body of an answer.
const (
	codeNotReady     = 300 // 300 to 399: the server is not ready
	codeUnregistered = 301 // the connection is not registered
	codeNoHandler    = 302 // the server does not support the request
	codeForbidden    = 403
	// The server announces only some of the services
	// (nacos.naming.fuzzy.watch.max.pattern.match.service.count) or accepts no
	// further pattern (...max.pattern.count).
	codePatternsOverLimit = 50310
	codeMatchesOverLimit  = 50311
)

// resultOK is the resultCode of success.
const resultOK = 200

// Types of messages of the server.
const (
	typeSetupAck        = "SetupAckRequest"
	typePush            = "NotifySubscriberRequest"
	typeConnectReset    = "ConnectResetRequest"
	typeFuzzySync       = "NamingFuzzyWatchSyncRequest"
	typeFuzzyChange     = "NamingFuzzyWatchChangeNotifyRequest"
	typeErrorResponse   = "ErrorResponse"
	fuzzyAdd            = "ADD_SERVICE"
	fuzzyDelete         = "DELETE_SERVICE"
	fuzzyInitNotify     = "FUZZY_WATCH_INIT_NOTIFY"
	fuzzyInitFinished   = "FINISH_FUZZY_WATCH_INIT_NOTIFY"
	fuzzyDiff           = "FUZZY_WATCH_DIFF_SYNC_NOTIFY"
	fuzzyWatch          = "WATCH"
	patternSeparator    = ">>"
	serviceKeySeparator = "@@"
)

// setupRequest is the first message on the stream, with fields that the SDK's
// type lacks.
type setupRequest struct {
	*rpc_request.ConnectionSetupRequest
	// AbilityTable lists this client's abilities, for servers from 2.4 on;
	// older ones ignore it.
	AbilityTable map[string]bool `json:"abilityTable"`
}

// fuzzyWatchRequest requests a fuzzy watch of a pattern (3.x).
type fuzzyWatchRequest struct {
	*rpc_request.Request
	Namespace         string   `json:"namespace"`
	GroupKeyPattern   string   `json:"groupKeyPattern"`
	ReceivedGroupKeys []string `json:"receivedGroupKeys"`
	WatchType         string   `json:"watchType"`
	Initializing      bool     `json:"initializing"`
	// IsInitializing is the name of the field in 3.0.
	IsInitializing bool   `json:"isInitializing"`
	Module         string `json:"module"`
}

// GetRequestType implements rpc_request.IRequest.
func (*fuzzyWatchRequest) GetRequestType() string { return "NamingFuzzyWatchRequest" }

// serverRequest is the union of the fields of the server's requests.
type serverRequest struct {
	RequestID string `json:"requestId"`

	// SetupAckRequest
	AbilityTable map[string]bool `json:"abilityTable"`

	// NotifySubscriberRequest, which has no namespace
	ServiceInfo model.Service `json:"serviceInfo"`

	// ConnectResetRequest
	ServerIP   string `json:"serverIp"`
	ServerPort string `json:"serverPort"`

	// NamingFuzzyWatchSyncRequest and NamingFuzzyWatchChangeNotifyRequest
	SyncType        string         `json:"syncType"`
	GroupKeyPattern string         `json:"groupKeyPattern"`
	Contexts        []fuzzyContext `json:"contexts"`
	TotalBatch      int            `json:"totalBatch"`
	CurrentBatch    int            `json:"currentBatch"`
	ServiceKey      string         `json:"serviceKey"`
	ChangedType     string         `json:"changedType"`
}

// fuzzyContext is one service in a batch of a fuzzy watch.
type fuzzyContext struct {
	ServiceKey  string `json:"serviceKey"`
	ChangedType string `json:"changedType"`
}

// serverCheckResponse is the answer to a ServerCheckRequest.
type serverCheckResponse struct {
	rpc_response.ServerCheckResponse
	// SupportAbilityNegotiation announces a SetupAckRequest after the setup.
	SupportAbilityNegotiation bool `json:"supportAbilityNegotiation"`
}

// serverError is an error answer of the server.
type serverError struct {
	code    int // errorCode, or resultCode if there is none
	message string
}

// Error implements error.
func (e *serverError) Error() string {
	return fmt.Sprintf("nacos answers %d %q", e.code, plugin.Excerpt(e.message))
}

// errNoHosts reports an answer or a push without a list of instances. A service
// without instances has an empty list.
var errNoHosts = errors.New("it holds no list of instances")

// hasCode reports whether err is an answer of the server with the code.
func hasCode(err error, code int) bool {
	e, ok := errors.AsType[*serverError](err)
	return ok && e.code == code
}

// isForbidden reports whether the server denied access.
func isForbidden(err error) bool {
	return hasCode(err, codeForbidden) || hasCode(err, 401)
}

// encodeRequest encodes the payload of a request. headers carry the
// credentials.
func encodeRequest(request rpc_request.IRequest, headers map[string]string) (*grpcapi.Payload, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", request.GetRequestType(), err)
	}
	return &grpcapi.Payload{
		Metadata: &grpcapi.Metadata{Type: request.GetRequestType(), Headers: headers},
		Body:     &anypb.Any{Value: body},
	}, nil
}

// encodeAck encodes the acknowledgement of a request of the server. Its type is
// named after that of the request.
func encodeAck(requestType, requestID string) *grpcapi.Payload {
	body, _ := json.Marshal(rpc_response.Response{ResultCode: resultOK, Success: true, RequestId: requestID}) // cannot fail: plain fields
	return &grpcapi.Payload{
		Metadata: &grpcapi.Metadata{Type: strings.TrimSuffix(requestType, "Request") + "Response"},
		Body:     &anypb.Any{Value: body},
	}
}

// decodeResponse decodes an answer into response, a pointer. It returns a
// *serverError for an error answer.
func decodeResponse(p *grpcapi.Payload, response any) error {
	var head rpc_response.Response
	body := p.GetBody().GetValue()
	if err := json.Unmarshal(body, &head); err != nil {
		return fmt.Errorf("decode %s: %w", p.GetMetadata().GetType(), err)
	}
	if head.ResultCode != resultOK || p.GetMetadata().GetType() == typeErrorResponse {
		e := &serverError{code: head.ErrorCode, message: head.Message}
		if e.code == 0 {
			e.code = head.ResultCode
		}
		return e
	}
	if err := json.Unmarshal(body, response); err != nil {
		return fmt.Errorf("decode %s: %w", p.GetMetadata().GetType(), err)
	}
	return nil
}

// decodeRequest decodes a request of the server. On error it returns the fields
// that could be decoded, so that the request can be acknowledged.
func decodeRequest(p *grpcapi.Payload) (*serverRequest, error) {
	r := &serverRequest{}
	body := p.GetBody().GetValue()
	if err := json.Unmarshal(body, r); err != nil {
		var id struct {
			RequestID   string `json:"requestId"`
			ServiceInfo struct {
				Name      string `json:"name"`
				GroupName string `json:"groupName"`
			} `json:"serviceInfo"`
		}
		_ = json.Unmarshal(body, &id) // decoded fields are set even on error
		return &serverRequest{
			RequestID:   id.RequestID,
			ServiceInfo: model.Service{Name: id.ServiceInfo.Name, GroupName: id.ServiceInfo.GroupName},
		}, fmt.Errorf("decode %s: %w", p.GetMetadata().GetType(), err)
	}
	if typ := p.GetMetadata().GetType(); typ == typePush && r.ServiceInfo.Hosts == nil {
		return r, fmt.Errorf("decode %s: %w", typ, errNoHosts)
	}
	return r, nil
}

// splitServiceKey splits "NAMESPACE@@GROUP@@NAME". Only the name may contain
// the separator.
func splitServiceKey(key string) (namespace, group, name string, ok bool) {
	parts := strings.SplitN(key, serviceKeySeparator, 3)
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}

// splitGrouped splits "GROUP@@NAME", which some answers have in place of the
// name.
func splitGrouped(group, name string) (g, n string) {
	if before, after, ok := strings.Cut(name, serviceKeySeparator); ok && (group == "" || group == before) {
		return before, after
	}
	return group, name
}
